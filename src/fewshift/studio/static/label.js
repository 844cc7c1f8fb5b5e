// Label: one image after another. A decision is sent at once, the next image is there already, and nothing waits for the network.

import { ask, button, capital, counted, element, keysOf, percent, picture, Refusal, say, tab, tell, warn } from "/static/page.js";
import { go } from "/static/main.js";

const AHEAD = 4; // images that are fetched before they are needed
const MANY = 10; // classes, from which on there is a search box
const HERE = "image"; // what a reload goes on with

let studio, keys, current = null, queue = [], sending = 0, counts = {}, filter = "", filling = null, ended = false;
let told = 0; // the version of the labels that the studio answered this tab's last decision with
const decided = new Set(); // images that a late answer must not bring back
let mode = sessionStorage.getItem("mode") ?? "spread";
let stage, side, bars, search, foot;

export function show(place, given, carried) {
  studio = given;
  keys = keysOf(studio.facts.classes);
  counts = { ...studio.pulse.counts };
  stage = element("figure", { class: "stage" });
  bars = element("div", { class: "choices", role: "group", "aria-label": "Classes" });
  foot = element("div", { class: "foot" });
  filter = "";
  search = element("input", { type: "search", placeholder: "Search a class", "aria-label": "Search a class", autocomplete: "off" });
  search.addEventListener("input", () => { filter = search.value; drawBars(); });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && matching().length && filter) { choose("labelled", matching()[0]); clear(); }
    else if (event.key === "Escape") clear();
    else return;
    event.preventDefault();
  });
  side = element("div", { class: "side" });
  place.replaceChildren(element("div", { class: "labelling" }, stage, side));
  const wanted = carried?.number ?? sessionStorage.getItem(HERE);
  queue = [];
  current = null;
  ended = false;
  begin(wanted, carried !== undefined);
}

async function begin(number, asked) {
  try {
    if (number !== null && number !== undefined) {
      const image = await ask("image", { number });
      if (asked || image.state === "open") current = image;
    }
  } catch (error) {
    if (!(error instanceof Refusal)) throw error; // an image of another folder
  }
  await fill();
  if (current === null) advance();
  else draw();
}

export function pulse() {
  if (sending || studio.pulse.version < told) return; // asked for before the last decision: it does not count that one
  counts = { ...studio.pulse.counts };
  drawBars();
  drawFoot();
  if (current && current.guess === null && !current.broken) refresh(current.number);
  if (current && studio.pulse.changed.includes(current.number)) refresh(current.number);
  if (ended && studio.pulse.tally.open > 0) fill().then(advance);
}

async function refresh(number) {
  const image = await ask("image", { number });
  if (current?.number !== number || sending) return;
  const elsewhere = image.version !== current.version;
  current = image;
  drawSide();
  if (elsewhere) say(`${image.name} was labelled in another tab: ${image.label ?? image.state}`);
}

export function key(event) {
  if (keys.has(event.key)) choose("labelled", keys.get(event.key));
  else if (event.key === "Enter" && !event.target.matches("button, a, summary")) accept();
  else if (event.key === "u" || event.key === "Backspace") undo();
  else if (event.key === "s") choose("skipped");
  else if (event.key === "x") choose("none of these");
  else if (event.key === "r") change(mode === "random" ? "spread" : "random");
  else if (event.key === "/" && search.isConnected) search.focus();
  else return false;
  return true;
}

function accept() {
  if (current?.guess) choose("labelled", current.guess);
  else say("the network has not looked at this image yet");
}

function clear() {
  filter = search.value = "";
  search.blur();
  drawBars();
}

async function choose(state, label = null) {
  const image = current;
  if (image === null) return;
  if (image.label) counts[image.label] -= 1;
  if (label) counts[label] += 1;
  sending += 1;
  decided.add(image.number);
  const words = label ? `${image.name} is ${label}` : `${image.name}: ${state}`;
  advance();
  try {
    const saved = await tell("mark", { number: image.number, state, label, base: image.version, tab });
    told = Math.max(told, saved.version);
    say(`${words}: saved on disk`);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    decided.delete(image.number);
    if (label) counts[label] -= 1;
    if (image.label) counts[image.label] += 1;
    warn(`${words}: not saved. ${capital(error.message)}`);
    if (current) queue.unshift(current);
    current = error.status === 409 ? await ask("image", { number: image.number }) : image;
    draw();
  } finally {
    sending -= 1;
    drawBars();
    drawFoot();
  }
  fill();
}

async function undo() {
  try {
    const image = await tell("undo", { tab });
    if (image === null) return say("there is nothing to undo");
    decided.delete(image.number);
    told = Math.max(told, image.version);
    counts = { ...(await ask("pulse")).counts };
    if (current && current.number !== image.number) queue.unshift(current);
    queue = queue.filter((waiting) => waiting.number !== image.number);
    current = await ask("image", { number: image.number });
    ended = false;
    draw();
    say(`undone: ${image.name} is ${image.label ?? (image.state === "open" ? "without a label" : image.state)} again`);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    warn(error.message);
  }
}

function change(to) {
  mode = to;
  sessionStorage.setItem("mode", mode);
  queue = [];
  say(mode === "random" ? "images come at random" : "images come spread over classes");
  drawFoot();
  fill();
}

function following() {
  queue = queue.filter((image) => !decided.has(image.number)); // one that was asked for while it was being decided
  return queue.shift() ?? null;
}

function advance() {
  current = following();
  if (current === null) {
    stage.replaceChildren();
    fill().then(() => queue.length ? null : fill()).then(() => {
      if (current !== null) return;
      current = following();
      ended = current === null;
      draw();
    });
    return;
  }
  draw();
  fill();
}

async function fill() {
  if (filling) return filling;
  if (queue.length >= AHEAD - 1) return;
  const without = [current, ...queue].filter(Boolean).map((image) => image.number);
  filling = ask("next", { tab, mode, count: AHEAD - queue.length, without: without.join(",") });
  const asked = mode;
  try {
    const images = await filling;
    const present = new Set([current?.number, ...queue.map((image) => image.number), ...decided]);
    if (asked === mode) queue.push(...images.filter((image) => !present.has(image.number)));
    for (const image of queue) new Image().src = `/picture/${image.number}?size=large`; // there before it is shown
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    warn(error.message);
  } finally {
    filling = null;
  }
  if (asked !== mode) await fill();
}

function draw() {
  if (current === null) {
    sessionStorage.removeItem(HERE);
    const words = studio.pulse.tally.all ? "Every image was looked at." : "There are no images yet.";
    stage.replaceChildren(element("p", { class: "lead" }, words));
  } else {
    sessionStorage.setItem(HERE, current.number);
    stage.replaceChildren(element("div", { class: "frame" }, picture(current, "large", `Image to label: ${current.name}`)),
      element("figcaption", {}, current.name));
  }
  drawSide();
}

function drawSide() {
  if (studio.step !== "label") return;
  const searching = document.activeElement === search;
  side.replaceChildren(guess(), ...(studio.facts.classes.length > MANY ? [search] : []), bars, foot);
  if (searching) search.focus();
  drawBars();
  drawFoot();
}

function guess() {
  if (current === null) return element("p", { class: "guess-line" });
  const now = current.state === "labelled" ? element("span", { class: "now" }, "Label: ", element("b", {}, current.label))
    : current.state === "open" ? null : element("span", { class: "now" }, capital(current.state));
  if (current.broken) return element("p", { class: "guess-line" }, "This image cannot be read. Skip it.", now);
  if (current.guess === null) return element("p", { class: "guess-line soft" }, "The network has not looked at this image yet.", now);
  const yes = button([element("span", {}, current.guess), element("small", {}, percent(current.confidence)), element("kbd", {}, "Enter")], accept,
    { class: "primary", "aria-label": `Yes, it is ${current.guess}, as the network says with ${percent(current.confidence)}` });
  return element("div", { class: "guess-line" }, element("span", { class: "soft" }, "The network says"), yes, now);
}

function matching() {
  const words = filter.trim().toLowerCase();
  const names = studio.facts.classes.filter((name) => name.toLowerCase().includes(words));
  return words ? names.sort((one, other) => other.toLowerCase().startsWith(words) - one.toLowerCase().startsWith(words)) : names;
}

function drawBars() {
  const wanted = studio.facts.wanted;
  const keyOf = new Map([...keys].map(([pressed, name]) => [name, pressed]));
  const rows = matching().map((name) => {
    const count = counts[name] ?? 0;
    const bar = element("span", { class: "bar", "aria-hidden": "true" }, element("i"));
    bar.firstChild.style.width = `${Math.min(100, 100 * count / wanted)}%`;
    const chosen = current?.label === name;
    return button([element("kbd", {}, keyOf.get(name) ?? ""), element("span", { class: "name" }, name),
      element("small", {}, count > wanted ? `${count}` : `${count} of ${wanted}`), bar], () => choose("labelled", name),
    { class: `choice${count >= wanted ? " full" : ""}`, disabled: current === null, "aria-pressed": String(chosen),
      "aria-label": `${name}: ${count} of ${wanted} labels`, "aria-keyshortcuts": keyOf.get(name) ?? null });
  });
  const refocus = keepFocus(bars);
  bars.replaceChildren(...rows);
  const { classes } = studio.facts;
  bars.classList.toggle("many", classes.length > MANY);
  bars.classList.toggle("pairs", classes.length > 6 && classes.every((name) => name.length <= 12));
  refocus();
}

// What is drawn again keeps the focus where it was.
function keepFocus(place) {
  const focused = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  return () => place.querySelectorAll("button")[focused]?.focus();
}

function drawFoot() {
  const none = current === null;
  const { wanted, classes } = studio.facts;
  const full = classes.filter((name) => (counts[name] ?? 0) >= wanted).length;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const act = (words, pressed, onclick, off = false) => button([words, " ", element("kbd", {}, pressed)], onclick, { class: "quiet", disabled: off });
  const enough = full === classes.length;
  const kinds = [["spread", "Every class soon"], ["random", "At random"]].map(([kind, words]) =>
    button(words, () => change(kind), { class: "quiet", "aria-pressed": String(mode === kind) }));
  const refocus = keepFocus(foot);
  foot.replaceChildren(
    element("div", { class: "row" }, act("Not any of these", "x", () => choose("none of these"), none), act("Skip", "s", () => choose("skipped"), none), act("Undo", "u", undo)),
    element("div", { class: "row modes", role: "group", "aria-label": "Which image comes next" }, element("span", { class: "soft" }, "Next:"), ...kinds),
    element("p", { class: "soft", id: "tally" }, sending ? "saving …" : `${counted(total, "label")}, all on disk; ${full} of ${counted(classes.length, "class", "classes")} ${full === 1 ? "has" : "have"} ${wanted}`),
    enough || none ? element("p", {}, button("Adapt the network", () => go("adapt"), { class: "primary" })) : "");
  refocus();
}
