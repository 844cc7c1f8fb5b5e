// Look: all images in pages, what the network says about each, and whether they differ from those of training.

import { ask, button, capital, counted, element, keysOf, percent, picture, Refusal, say, tab, tell, warn } from "/static/page.js";
import { go } from "/static/main.js";

const PAGE = 96;
const STATES = [["all", "All images"], ["open", "Without a label"], ["labelled", "Labelled"], ["skipped", "Skipped"],
  ["none of these", "Not any of these"], ["unreadable", "Cannot be read"]];

const view = { start: 0, show: "all", label: "", sort: "name", query: "", labels: true };
let studio, grid, pager, shift, rows = [], total = 0, focus = 0, known = -1, version = -1, counter = 0, loading = null;

export function show(place, given) {
  studio = given;
  known = -1;
  shift = element("section", { class: "shift", "aria-label": "Do the images differ from those of training?" });
  grid = element("ul", { class: "grid", "aria-label": "Images" });
  pager = element("div", { class: "pager" });
  place.replaceChildren(shift, filters(), ...(studio.facts.pixels ? [legend()] : []), grid, pager);
  drawShift();
  load();
}

export function pulse() {
  drawShift();
  const { answers, version: now, tally } = studio.pulse;
  if (loading) return;
  const waiting = rows.some((row) => row.guess === null && !row.broken);
  if (now !== version || (answers.known !== known && (waiting || view.label || view.sort !== "name")) || tally.all !== counter) {
    load(true);
  }
}

export function key(event) {
  const across = Math.max(1, Math.round(grid.clientWidth / (grid.firstElementChild?.clientWidth || 1)));
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across };
  const inside = grid.contains(event.target) || event.target === document.body || event.target.id === "view";
  if (event.key === "PageDown") turn(1);
  else if (event.key === "PageUp") turn(-1);
  else if (inside && event.key in steps) move(focus + steps[event.key]);
  else if (inside && event.target.matches("button.tile") && labelKey(event.key)) return true;
  else return false;
  return true;
}

function labelKey(pressed) {
  const name = keysOf(studio.facts.classes).get(pressed);
  if (name === undefined || studio.facts.pixels) return false;
  const row = rows[focus];
  tell("mark", { number: row.number, state: "labelled", label: name, base: row.version, tab }).then((changed) => {
    rows[focus] = changed;
    say(`${changed.name} is ${name}: saved on disk`);
    draw(true);
  }, (error) => warn(error.message));
  return true;
}

function move(place) {
  if (place < 0 && view.start > 0) return turn(-1);
  if (place >= rows.length && view.start + PAGE < total) return turn(1);
  focus = Math.min(Math.max(place, 0), rows.length - 1);
  draw(true);
}

function turn(by) {
  const start = view.start + by * PAGE;
  if (start < 0 || start >= total) return;
  view.start = start;
  focus = 0;
  load().then(() => { window.scrollTo(0, 0); draw(true); });
}

async function load(quiet = false) {
  const { start, show, label, sort, query } = view;
  const mine = loading = Symbol("the last one counts");
  let page;
  try {
    page = await ask("images", { start, count: PAGE, show, label, sort, query });
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return quiet || warn(error.message);
  } finally {
    if (loading === mine) loading = null;
    else page = null;
  }
  if (page === null) return;
  ({ total, images: rows } = page);
  known = studio.pulse.answers.known;
  version = studio.pulse.version;
  counter = studio.pulse.tally.all;
  if (start >= total && start > 0) {
    view.start = Math.max(0, PAGE * Math.floor((total - 1) / PAGE));
    return load(quiet);
  }
  focus = Math.min(focus, Math.max(0, rows.length - 1));
  if (studio.step === "look") draw(grid.contains(document.activeElement));
}

function draw(focused = false) {
  const present = new Map([...grid.children].map((item) => [item.dataset.number, item]));
  const items = rows.map((row, place) => {
    const old = present.get(String(row.number));
    const item = old ?? element("li", { "data-number": row.number });
    fill(item, row, place);
    return item;
  });
  if (items.length !== grid.children.length || items.some((item, place) => item !== grid.children[place])) grid.replaceChildren(...items);
  if (!rows.length) grid.replaceChildren(element("li", { class: "nothing" }, nothing()));
  if (focused) grid.querySelectorAll("button.tile")[focus]?.focus();
  drawPager();
}

function nothing() {
  if (studio.pulse.tally.all) return element("p", {}, "No image is like that.");
  const again = button("Look again", async () => {
    const { new: found } = await tell("again");
    say(found ? `${counted(found, "new image")}` : "still no images");
    load();
  });
  return element("div", {}, element("p", {}, "There are no images yet. Copy some into ", element("b", {}, studio.facts.folder), "."),
    studio.pulse.note ? element("p", { class: "soft" }, capital(studio.pulse.note)) : null, again);
}

function fill(item, row, place) {
  const state = JSON.stringify([row, place === focus, view.labels]);
  if (item.dataset.drawn === state) return;
  const words = `${row.name}: ${spoken(row)}`;
  const old = item.querySelector("img, .broken");
  const shape = `${view.labels} ${Boolean(row.broken)}`;
  const shown = old && item.dataset.shape === shape ? old : picture(row, "small", "", { lazy: true, labels: row.scene && view.labels });
  const open = () => { focus = place; if (!studio.facts.pixels) go("label", { number: row.number }); else enlarge(row); };
  const tile = element("button", { type: "button", class: "tile", tabindex: place === focus ? 0 : -1, "aria-label": words, onclick: open,
    onfocus: () => { focus = place; } }, element("span", { class: "frame" }, shown), caption(row));
  item.className = row.broken ? "unreadable" : row.state.replaceAll(" ", "-");
  item.dataset.drawn = state;
  item.dataset.shape = shape;
  const focused = item.contains(document.activeElement);
  item.replaceChildren(tile);
  if (focused) tile.focus();
}

function caption(row) {
  const lines = element("span", { class: "caption" });
  if (row.broken) lines.append(element("span", { class: "soft" }, "cannot be read"));
  else if (row.state === "labelled") lines.append(element("b", {}, row.label));
  else if (row.state !== "open") lines.append(element("span", { class: "soft" }, row.state));
  if (!row.broken && row.guess !== null && row.guess !== row.label) {
    lines.append(element("span", { class: "guess" }, `${row.guess} `, element("small", {}, percent(row.confidence))));
  } else if (row.guess !== null && row.guess === row.label) {
    lines.append(element("small", { class: "soft" }, `network agrees, ${percent(row.confidence)}`));
  } else if (!row.broken && row.guess === null && !studio.facts.pixels) lines.append(element("span", { class: "soft" }, "…"));
  if (studio.facts.pixels) lines.append(element("span", { class: row.scene ? "" : "soft" }, row.scene ? row.name : `${row.name}, no labels`));
  return lines;
}

function spoken(row) {
  if (row.broken) return "cannot be read";
  const guess = row.guess === null ? "" : `, the network says ${row.guess}, ${percent(row.confidence)}`;
  return (row.state === "labelled" ? `labelled ${row.label}` : row.state === "open" ? "no label" : row.state) + guess;
}

function enlarge(row) {
  const dialog = element("dialog", { class: "large", "aria-label": row.name }, picture(row, "large", row.name, { labels: row.scene && view.labels }),
    element("form", { method: "dialog" }, element("span", {}, row.name), element("button", { class: "quiet" }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function filters() {
  const choose = (name, words, pairs) => {
    const select = element("select", { "aria-label": words }, ...pairs.map(([value, text]) =>
      element("option", { value, selected: view[name] === value }, text)));
    select.addEventListener("change", () => { view[name] = select.value; view.start = 0; focus = 0; load(); });
    return select;
  };
  const search = element("input", { type: "search", placeholder: "File name", "aria-label": "Search by file name", value: view.query });
  search.addEventListener("input", () => { view.query = search.value; view.start = 0; load(); });
  const classes = [["", "Every class"], ...studio.facts.classes.map((name) => [name, name])];
  const parts = studio.facts.pixels ? [overlaySwitch()] : [
    choose("show", "Which images", STATES), choose("label", "Of which class", classes),
    choose("sort", "In which order", [["name", "By name"], ["unsure", "Least sure first"]])];
  const again = button("Look for new files", async () => {
    const { new: found } = await tell("again");
    say(found ? counted(found, "new image") : "no new images");
    load();
  }, { class: "quiet" });
  return element("div", { class: "filters" }, ...parts, search, again);
}

function legend() {
  return element("ul", { class: "legend", "aria-label": "Classes" }, ...studio.facts.classes.map((name, place) => {
    const colour = element("i", { "aria-hidden": "true" });
    colour.style.background = `rgb(${studio.facts.palette[place].join(" ")})`;
    return element("li", {}, colour, name);
  }));
}

function overlaySwitch() {
  const box = element("input", { type: "checkbox", checked: view.labels });
  box.addEventListener("change", () => { view.labels = box.checked; draw(); });
  return element("label", { class: "switch" }, box, " Show labels");
}

function drawPager() {
  const first = total ? view.start + 1 : 0, last = Math.min(view.start + PAGE, total);
  const back = button("Previous", () => turn(-1), { class: "quiet", disabled: view.start === 0 });
  const on = button("Next", () => turn(1), { class: "quiet", disabled: last >= total });
  const words = element("span", {}, total ? `${first.toLocaleString("en")} to ${last.toLocaleString("en")} of ${counted(total, "image")}` : "no images");
  pager.replaceChildren(back, words, on);
}

function drawShift() {
  const { answers, tally, note } = studio.pulse;
  const facts = JSON.stringify([answers, tally.all, note]);
  if (shift.dataset.drawn === facts) return;
  shift.dataset.drawn = facts;
  const verdict = answers.shift;
  const parts = [];
  if (!tally.all) parts.push(element("p", { class: "lead" }, "No images yet."));
  else if (verdict === null) parts.push(element("p", { class: "lead" }, "Looking whether these images differ from those of training …"));
  else {
    const lead = verdict.shifted === null ? capital(verdict.words)
      : verdict.shifted ? "These images differ from what the network was trained on." : "These images look like what the network was trained on.";
    parts.push(element("p", { class: "lead" }, lead));
    if (verdict.shifted !== null) parts.push(element("details", {}, element("summary", {}, "How that is known, and what it means"),
      element("p", {}, `${capital(verdict.words)}.`), element("p", {}, `${capital(verdict.meaning)}.`)));
  }
  const busy = answers.busy && !studio.facts.pixels && answers.known < tally.all;
  parts.push(element("p", { class: "soft" }, busy ? `The network has looked at ${answers.known.toLocaleString("en")} of ${counted(tally.all, "image")}; you need not wait.`
    : [counted(tally.all, "image"), answers.broken ? `${answers.broken} cannot be read` : "", studio.facts.taken_in].filter(Boolean).join("; ") + "."));
  if (note && tally.all) parts.push(element("p", { class: "soft" }, `${capital(note)}.`));
  if (answers.sentence) parts.push(element("p", { class: "alert" }, `${capital(answers.sentence)}.`));
  shift.className = `shift ${verdict?.shifted ? "shifted" : verdict ? "alike" : ""}`;
  shift.replaceChildren(...parts);
}
