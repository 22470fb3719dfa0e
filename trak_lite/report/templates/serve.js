"use strict";
// Without this script every form and link works as well: it only replaces the results in place.
const part = (name, page = document) => page.getElementById(name);
const FOCUSABLE = 'a[href], button, select, textarea, input:not([type="hidden"]), [tabindex="0"]';
// Replaces the results and keeps the focus: on the same id, or the same place in the row. Where the row is gone,
// because it has a mark now, this is the row that took its place.
const replace = (results) => {
  const active = document.activeElement;
  const row = active.closest("tr[data-row]");
  const [number, place] = row ? [row.sectionRowIndex, [...row.querySelectorAll(FOCUSABLE)].indexOf(active)] : [];
  part("results").replaceWith(results);
  const rows = [...document.querySelectorAll("tr[data-row]")];
  const other = row && (part(row.id) || rows[Math.min(number, rows.length - 1)]);
  const next = part(active.id) || (other && (other.querySelectorAll(FOCUSABLE)[place] || other.querySelector("button")));
  (next || results).focus({ preventScroll: true });
};
let last = Promise.resolve();
let failures = "";
let waiting = 0;
// One request at a time: the answer to an earlier key never replaces that to a later one, and no failure is lost.
const show = (address, options) => {
  waiting += 1;
  part("status").textContent = "Working.";
  part("results").setAttribute("aria-busy", "true");
  last = last.then(() => load(address, options));
};
const load = async (address, options) => {
  let said, ok = false;
  try {
    const answer = await fetch(address, options);
    const text = await answer.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    if (!part("results", page)) throw new Error(text);
    replace(part("results", page));
    document.title = page.title;
    document.querySelector("h1").textContent = page.title;
    said = part("status", page).textContent;
    ok = answer.ok;
    if (ok) history.pushState(null, "", answer.url);
  } catch (error) {
    part("results").removeAttribute("aria-busy");
    said = "No page came back. " + error.message;
  }
  part("status").textContent = failures + said;
  waiting -= 1;
  if (!waiting) failures = "";
  else if (!ok) failures += said + " ";
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
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const row = event.target.closest("tr[data-row]");
  const ends = row ? { n: row.nextElementSibling, p: row.previousElementSibling } : { n: document.querySelector("tr[data-row]") };
  const other = ends[event.key];
  const button = (other || row)?.querySelector(other ? "button" : `button[data-key="${CSS.escape(event.key)}"]`);
  if (!button) return;
  event.preventDefault();
  if (other) button.focus();
  else button.click();
});
