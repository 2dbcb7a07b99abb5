"use strict";
// Tables that sort, and the browser of queries. Texts enter the page as text, never as markup.
(() => {
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };

  // A table that goes on to the right says so, until it has been scrolled to its end.
  for (const box of document.querySelectorAll(".scroll")) {
    const cue = make("p", { className: "cue", textContent: "More columns to the right: scroll the table →" });
    box.before(cue);
    const look = () => {
      const more = box.scrollWidth - box.clientWidth - box.scrollLeft > 8;
      box.classList.toggle("more", more);
      cue.classList.toggle("shown", more);
    };
    box.addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    look();
  }

  // Sorting: figures first from high to low, names from a to z; a second click turns the order round; what is missing stays last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const body = table.tBodies[0];
      const rows = [...body.rows];
      const value = (row) => (column === 0 ? row.cells[0].textContent : Number(row.cells[column].dataset.value ?? NaN));
      const known = rows.filter((row) => column === 0 || !Number.isNaN(value(row)));
      const down = head.ariaSort === "descending" ? false : head.ariaSort === "ascending" ? true : column !== 0;
      known.sort((a, b) => (column === 0 ? value(a).localeCompare(value(b)) : value(a) - value(b)) * (down ? -1 : 1));
      body.append(...known, ...rows.filter((row) => !known.includes(row)));
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    }));
  }

  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const texts = new Map(Object.entries(data.texts));
  const PAGE = 20;
  let limit = PAGE;
  const [first, second, order, find, list, more, shown] =
    ["first", "second", "order", "find", "list", "more", "shown"].map((id) => document.getElementById(id));
  const single = data.runs.length === 1;
  [first.value, second.value] = data.start.map(String);
  document.getElementById("controls").hidden = false;
  if (single) for (const control of [second, order]) control.parentElement.hidden = true;

  const difference = (query) => query.values[first.value] - query.values[second.value];
  const points = (value) => (value > 0 ? "+" : value < 0 ? "−" : "±") + Math.abs(100 * value).toFixed(1);
  const rankText = (rank, depth) => (rank === null ? `not in first ${depth}` : `rank ${rank}`);
  const ranks = (query) => [first.value, second.value].slice(0, single ? 1 : 2)
    .map((run) => rankText(query.first[run], query.depth[run])).join(" | ");

  const orders = {
    either: (a, b) => Math.abs(difference(b)) - Math.abs(difference(a)),
    first: (a, b) => difference(b) - difference(a),
    second: (a, b) => difference(a) - difference(b),
    worst: (a, b) => Math.max(a.values[first.value], a.values[second.value]) - Math.max(b.values[first.value], b.values[second.value]),
  };

  const passage = (key, rank, relevant) => {
    const [title, text] = texts.get(key);
    const button = make("button", { type: "button", ariaExpanded: "false" });
    if (relevant) button.append(make("span", { className: "badge", textContent: "relevant " }));
    if (title) button.append(make("strong", { textContent: title }), " ");
    button.append(text);
    button.addEventListener("click", () => { button.ariaExpanded = String(button.ariaExpanded !== "true"); });
    return make("li", { className: relevant ? "relevant" : "" }, make("span", { className: "rank", textContent: rank }), button);
  };

  const side = (query, run) => {
    const top = query.top[run];
    const below = query.wanted
      .map((key, place) => [key, query.ranks[run][place]])
      .filter(([key]) => !top.includes(key))
      .sort((a, b) => (a[1] ?? Infinity) - (b[1] ?? Infinity));
    return make("div", {},
      make("h4", { textContent: data.runs[run] }),
      make("p", { className: "small", textContent: `Relevant passage: ${rankText(query.first[run], query.depth[run])}. ${data.metric} ${(100 * query.values[run]).toFixed(1)}` }),
      make("ol", { className: "ranking" },
        ...top.map((key, place) => passage(key, String(place + 1), query.relevant.includes(key))),
        ...below.map(([key, rank]) => passage(key, rank === null ? "–" : String(rank), true))));
  };

  const item = (query) => {
    const details = make("details", {}, make("summary", {},
      make("span", { className: "delta", textContent: single ? (100 * query.values[first.value]).toFixed(1) : points(difference(query)) }),
      make("span", { className: "query", textContent: query.text }),
      make("span", { className: "ranks", textContent: ranks(query) })));
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector(".sides")) return;
      if (query.answers.length) details.append(make("p", { className: "answers", textContent: `Answers: ${query.answers.join(" · ")}` }));
      const chosen = single || first.value === second.value ? [first.value] : [first.value, second.value];
      details.append(make("div", { className: "sides" }, ...chosen.map((run) => side(query, run))));
    });
    return make("li", {}, details);
  };

  const draw = () => {
    const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fitting = data.queries.filter((query) => {
      const text = [query.id, query.text, ...query.answers].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    fitting.sort(orders[order.value]);
    list.replaceChildren(...fitting.slice(0, limit).map(item));
    more.hidden = fitting.length <= limit;
    const measure = single ? data.metric : `difference in ${data.metric}, first minus second run, in points`;
    const count = `${Math.min(limit, fitting.length)} of ${fitting.length}${words.length ? " that fit" : ""} shown`;
    shown.textContent = `${count}. In front: ${measure}. Behind: rank of the relevant passage.`;
  };
  const restart = () => { limit = PAGE; draw(); };
  for (const control of [first, second, order]) control.addEventListener("change", restart);
  find.addEventListener("input", restart);
  document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
  more.addEventListener("click", () => {
    const seen = limit;
    limit += PAGE;
    draw();
    list.children[seen]?.querySelector("summary").focus();
  });
  draw();
})();
