"use strict";
(() => {
  const place = (id) => document.getElementById(id);
  const element = (name, text) => {
    const made = document.createElement(name);
    made.textContent = text;
    return made;
  };

  const show = (board) => {
    document.title = `${board.title} - fedstale`;
    place("title").textContent = board.title;
    place("state").textContent = board.ended || "Running.";
    place("share").hidden = board.share === null;
    if (board.share !== null) place("share").value = board.share;
    place("left").textContent = board.left;
    place("settings").textContent = board.settings || "The app tells none.";
    place("cards").replaceChildren(...board.cards.map(([name, value]) => {
      const card = document.createElement("div");
      card.append(element("dt", name), element("dd", value));
      return card;
    }));
    place("failures").replaceChildren(...board.failures.map((cells) => {
      const row = document.createElement("tr");
      row.append(...cells.map((cell) => element("td", cell)));
      return row;
    }));
    for (const figure of board.figures) place("about-" + figure.id).textContent = figure.about;
    document.dispatchEvent(new CustomEvent("figures", { detail: board.figures }));
  };

  let seen = false;
  const ask = async () => {
    let answer = null;
    try {
      answer = await fetch("data.json", { cache: "no-store" });
    } catch (problem) {
      place("state").textContent = seen
        ? "The run is over, or its process cannot be reached. This is what it showed last."
        : "The run cannot be reached.";
    }
    if (answer && answer.ok) {
      show(await answer.json());
      seen = true;
    }
    setTimeout(ask, document.hidden ? 5000 : 1000);
  };
  ask();
})();
