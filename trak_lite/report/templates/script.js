"use strict";
const cards = [...document.querySelectorAll(".card")];
const texts = cards.map((card) => [...card.querySelectorAll(".content")].map((part) => part.textContent).join(" ")
  .toLowerCase());
const field = document.getElementById("query");
const found = document.getElementById("found");
const show = () => {
  const query = field.value.trim().toLowerCase();
  const number = query.replace(/^target +/, "");
  let count = 0;
  cards.forEach((card, place) => {
    const fits = card.dataset.target === number || texts[place].includes(query);
    card.hidden = !fits;
    count += fits ? 1 : 0;
  });
  found.textContent = count + " of " + cards.length + " targets";
};
field.addEventListener("input", show);
field.closest(".search").hidden = false;
show();
