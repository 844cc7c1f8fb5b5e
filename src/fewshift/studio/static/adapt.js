// Adapt: one button, progress with the time that is left, and labels for other programs.

import { button, capital, counted, duration, element, percent, Refusal, say, tell, warn } from "/static/page.js";
import { go } from "/static/main.js";

const FORMS = [["csv", "CSV"], ["label-studio", "Label Studio"], ["folders", "Class folders"], ["links", "Class folders of links"]];

let studio, box, facts, job, name, helping, seen;

export function show(place, given) {
  studio = given;
  box = element("section", { class: "job", "aria-label": "Adaptation" });
  facts = element("section", { "aria-label": "Labels" });
  name = element("input", { type: "text", value: name?.value ?? studio.facts.name, maxlength: 60, id: "place-name", autocomplete: "off" });
  helping = element("input", { type: "checkbox", checked: helping?.checked ?? false, id: "helping" });
  job = undefined;
  place.replaceChildren(element("div", { class: "column" }, facts, box, ...(studio.facts.pixels ? [] : [forms()])));
  seen = studio.pulse.work.jobs.adapt?.state;
  summarise();
  draw();
}

export function pulse() {
  const state = studio.pulse.work.jobs.adapt?.state;
  if (seen === "running" && state === "done") {
    seen = state;
    say("adapted: decide");
    return go("decide");
  }
  seen = state;
  summarise();
  draw();
}

function summarise() {
  if (studio.facts.pixels) return facts.replaceChildren(element("p", { class: "lead" }, "Adapt to the labels of pixels that lie beside the images."));
  const { counts } = studio.pulse, { classes, wanted } = studio.facts;
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const missing = classes.filter((each) => counts[each] === 0);
  const few = classes.filter((each) => counts[each] > 0 && counts[each] < wanted);
  const list = (names) => names.length > 6 ? `${names.slice(0, 6).join(", ")} and ${names.length - 6} more` : names.join(", ");
  const lines = [element("p", { class: "lead" }, total ? `${counted(total, "label")} in ${counted(classes.length - missing.length, "class", "classes")}.` : "There are no labels yet.")];
  if (missing.length && total) lines.push(element("p", {}, `Without a label: ${list(missing)}. Nothing will be known about ${missing.length === 1 ? "it" : "them"}.`));
  if (few.length) lines.push(element("p", { class: "soft" }, `${few.length === classes.length ? `Every class has fewer than ${wanted}` : `Fewer than ${wanted}: ${list(few)}`}. More labels make the evidence stronger.`));
  facts.replaceChildren(...lines);
}

function form() {
  const start = button("Adapt the network", begin, { class: "primary large" });
  const total = studio.facts.pixels || Object.values(studio.pulse.counts).some((count) => count > 0);
  if (!total) return [element("p", {}, button("Label some images first", () => go("label"), { class: "primary large" }))];
  return [
    element("p", { class: "field" }, element("label", { for: "place-name" }, "Name of the new place"), name),
    studio.facts.pixels ? null : element("p", { class: "switch" }, helping, element("label", { for: "helping" }, " Images without labels help too (slower)")),
    element("p", {}, start),
    element("p", { class: "soft" }, "The network itself stays as it is. You decide afterwards."),
  ].filter(Boolean);
}

async function begin() {
  try {
    const work = await tell("adapt", { name: name.value, unlabelled: helping.checked });
    studio.pulse.work = work;
    seen = "running";
    say("adapting");
    draw();
    box.querySelector("button")?.focus();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    warn(error.message);
  }
}

function draw() {
  const now = studio.pulse.work.jobs.adapt;
  if (now?.state !== "running") {
    const labels = Object.values(studio.pulse.counts).some((count) => count > 0);
    const key = `${now?.state} ${now?.sentence} ${labels} ${studio.pulse.work.undecided}`;
    if (job === key) return;
    job = key;
    const failed = now?.state === "failed" ? element("p", { class: "alert", role: "alert" }, `${capital(now.sentence)}.`) : null;
    const stopped = now?.state === "stopped" ? element("p", { class: "soft", role: "status" }, `${capital(now.sentence)}.`) : null;
    const ready = studio.pulse.work.outcome ? element("p", {}, button("Decide about the last adaptation", () => go("decide"), { class: "quiet" })) : null;
    return box.replaceChildren(...[failed, stopped, ...form(), ready].filter(Boolean));
  }
  if (job !== "running") {
    job = "running";
    const stop = button("Stop", async () => { studio.pulse.work = await tell("stop", { what: "adapt" }); draw(); }, { class: "quiet" });
    const bar = element("div", { class: "progress", role: "progressbar", "aria-label": "Adapting", "aria-valuemin": 0, "aria-valuemax": 100 }, element("i"));
    box.replaceChildren(element("p", { class: "lead" }, "Adapting"), bar, element("p", { class: "words" }), element("p", { class: "soft stage-words" }), element("p", {}, stop),
      element("p", { class: "soft" }, "You can go on labelling meanwhile; new labels count the next time."));
  }
  const bar = box.querySelector(".progress");
  bar.firstChild.style.width = percent(now.share).replace(" ", "");
  bar.setAttribute("aria-valuenow", Math.round(100 * now.share));
  const left = now.seconds_left === null ? "time left not known yet" : `about ${duration(now.seconds_left)} left`;
  box.querySelector(".words").textContent = `${percent(now.share)}, ${left}`;
  box.querySelector(".stage-words").textContent = now.stage;
}

function forms() {
  const said = element("p", { class: "soft", role: "status" });
  const write = async (form) => {
    try {
      said.textContent = `Written to ${(await tell("write", { form })).path}`;
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      said.textContent = capital(error.message);
    }
  };
  return element("details", { class: "forms" }, element("summary", {}, "Write the labels for other programs"),
    element("div", { class: "row" }, ...FORMS.map(([form, words]) => button(words, () => write(form), { class: "quiet" }))), said);
}
