// The frame around the four steps: which one is shown, keys, and the pulse of the studio.

import { ask, calm, element, Refusal, warn } from "/static/page.js";
import * as look from "/static/look.js";
import * as label from "/static/label.js";
import * as adapt from "/static/adapt.js";
import * as decide from "/static/decide.js";

const STEPS = { look, label, adapt, decide };
const KEYS = { a: "look", b: "label", c: "adapt", d: "decide" };
const OFTEN = 700, SELDOM = 3000; // milliseconds between two looks at the studio

export const studio = { facts: null, pulse: null, step: null };

// the token was exchanged for a cookie: it need not stay in the address
if (location.search) history.replaceState(null, "", location.pathname + location.hash);

let timer;
export async function beat() {
  clearTimeout(timer);
  let wait = SELDOM;
  try {
    const pulse = await ask("pulse", { since: studio.pulse?.version ?? 0 });
    const gone = document.querySelector("#alerts .gone");
    if (gone) calm();
    studio.pulse = pulse;
    STEPS[studio.step].pulse?.(studio);
    mark();
    const jobs = Object.values(pulse.work.jobs);
    if (pulse.answers.busy || jobs.some((job) => job.state === "running")) wait = OFTEN;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    warn(error.message);
    document.querySelector("#alerts .alert")?.classList.add("gone");
  }
  clearTimeout(timer);
  timer = setTimeout(beat, document.hidden ? 2 * SELDOM : wait);
}

function mark() {
  const jobs = studio.pulse.work.jobs;
  const busy = jobs.adapt?.state === "running";
  document.querySelector("[data-step=adapt]").classList.toggle("busy", busy);
  document.querySelector("[data-step=decide]").classList.toggle("ready", studio.pulse.work.undecided);
}

export function go(step, facts) {
  const same = location.hash === `#${step}`;
  studio.carried = facts;
  if (same) show();
  else location.hash = step;
}

function show() {
  const asked = location.hash.slice(1);
  const step = asked in STEPS && !(asked === "label" && studio.facts.pixels) ? asked : "look";
  const before = studio.step;
  studio.step = step;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.step === step) link.setAttribute("aria-current", "step");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.step = step;
  calm();
  const carried = studio.carried;
  studio.carried = undefined;
  STEPS[step].show(document.getElementById("view"), studio, carried);
  window.scrollTo(0, 0);
  if (before) beat(); // what the step before has changed
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  const typing = event.target.matches("input[type=text], input[type=search], select, textarea");
  if (typing) return;
  if (event.key === "?") document.getElementById("help").showModal();
  else if (event.key in KEYS) location.hash = KEYS[event.key];
  else if (!STEPS[studio.step].key?.(event)) return;
  event.preventDefault();
});
document.getElementById("help-button").addEventListener("click", () => document.getElementById("help").showModal());

try {
  [studio.facts, studio.pulse] = await Promise.all([ask("studio"), ask("pulse")]);
  const { folder, network, out } = studio.facts;
  document.title = `${folder} · fewshift studio`;
  document.getElementById("place").replaceChildren(
    element("b", {}, folder), ` and the network ${network}. Labels and adaptations are in `, element("b", {}, out), ".");
  if (studio.facts.pixels) document.querySelector("[data-step=label]").hidden = true;
  window.addEventListener("hashchange", show);
  mark();
  show();
  timer = setTimeout(beat, OFTEN);
} catch (error) {
  if (!(error instanceof Refusal)) throw error;
  warn(error.message);
}
