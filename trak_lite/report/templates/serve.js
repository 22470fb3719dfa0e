"use strict";
// Without this script every form and link works as well: it only replaces the results in place.
const part = (name, page = document) => page.getElementById(name);
const show = async (address, options) => {
  const focused = document.activeElement.id;
  part("status").textContent = "Working.";
  part("results").setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(address, options);
    const text = await answer.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    if (!part("results", page)) throw new Error(text);
    part("results").replaceWith(part("results", page));
    document.title = page.title;
    document.querySelector("h1").textContent = page.title;
    part("status").textContent = part("status", page).textContent;
    if (answer.ok) history.pushState(null, "", answer.url);
  } catch (error) {
    part("results").removeAttribute("aria-busy");
    part("status").textContent = "No page came back. " + error.message;
  }
  (part(focused) || part("results")).focus({ preventScroll: true });
};
document.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.target;
  const fields = new URLSearchParams(new FormData(form, event.submitter));
  if (form.method === "get") show(form.getAttribute("action") + "?" + fields);
  else show(form.getAttribute("action"), { method: "POST", body: fields });
});
addEventListener("popstate", () => location.reload());
document.addEventListener("keydown", (event) => {
  const row = event.target.closest("tr[data-row]");
  if (!row || event.target.tagName === "INPUT" || event.ctrlKey || event.metaKey || event.altKey) return;
  const other = { n: row.nextElementSibling, p: row.previousElementSibling }[event.key];
  const button = (other || row).querySelector(other ? "button" : `button[data-key="${CSS.escape(event.key)}"]`);
  if (!button) return;
  event.preventDefault();
  if (other) button.focus();
  else button.click();
});
