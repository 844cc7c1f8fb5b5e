// Decide: the verdict, how sure it is, what changes, labels to check, whether more labels would help; and then keep or throw away.

import { ask, button, capital, counted, duration, element, percent, picture, Refusal, say, tell, warn } from "/static/page.js";
import { curve, interval } from "/static/drawing.js";
import { go } from "/static/main.js";

const ROWS = 24;

let studio, result, place, flips, flipped, more, actions, said, shownFlips, drawn = {};

export function show(given, now) {
  place = given;
  studio = now;
  drawn = {};
  shownFlips = ROWS;
  load();
}

export function pulse() {
  const { outcome, looked_at: looked, jobs, curve: points } = studio.pulse.work;
  if (outcome !== drawn.outcome) return load();
  if (!result) return;
  if (looked !== drawn.looked) drawFlips(looked);
  const state = JSON.stringify([jobs.curve, jobs.export, Boolean(points)]);
  if (state !== drawn.state) {
    drawn.state = state;
    drawMore();
    drawActions();
  }
}

async function load() {
  result = await ask("result");
  drawn = { outcome: studio.pulse.work.outcome };
  if (result === null) {
    drawn.outcome = null;
    const busy = studio.pulse.work.jobs.adapt?.state === "running";
    return place.replaceChildren(element("div", { class: "column" }, element("p", { class: "lead" }, busy ? "The network is being adapted." : "There is nothing to decide yet."),
      element("p", {}, button(busy ? "See how far it is" : "Adapt the network", () => go("adapt"), { class: "primary" }))));
  }
  flips = element("section", { "aria-label": "Before and after" });
  more = element("section", { "aria-label": "Would more labels help?" });
  actions = element("section", { class: "actions", "aria-label": "Decision" });
  said = element("p", { role: "status", class: "soft said" });
  place.replaceChildren(element("div", { class: "column wide" }, verdict(), actions, scenes(), flips, suspects(), more));
  drawFlips(studio.pulse.work.looked_at);
  drawMore();
  drawActions();
}

function verdict() {
  const kind = { recommended: "good", "with caution": "caution", "not recommended": "against" }[result.advice];
  const gain = result.gain;
  const newer = result.newer_labels ? element("p", { class: "soft" }, "There are newer labels than this adaptation knows. ", button("Adapt again", () => go("adapt"), { class: "quiet" })) : null;
  return element("section", { class: `verdict ${kind}`, "aria-label": "Verdict" },
    element("p", { class: "advice" }, capital(result.advice)),
    element("p", { class: "headline" }, `${capital(result.recommendation[0])}.`),
    gain ? element("figure", {}, interval(gain)) : "",
    element("p", {}, `${result.sure}.`),
    element("p", { class: "next" }, `${result.next}.`),
    ...result.cautions.map((sentence) => element("p", { class: "note" }, `${sentence}.`)),
    newer ?? "",
    element("p", { class: "soft" }, `${result.name}: ${counted(result.labels, "label")}, method ${result.method}, ${duration(result.seconds)}, delta of ${result.size}.`));
}

function drawActions() {
  const kept = result.decision !== null;
  const job = studio.pulse.work.jobs.export;
  const exporting = job?.state === "running";
  const against = result.advice === "not recommended";
  const keep = button(against ? "Keep it all the same" : "Keep the delta", decideTo("keep"), { class: against ? "quiet" : "primary large", disabled: kept });
  const buttons = [keep,
    button(exporting ? "Exporting …" : "Export ONNX", act("export"), { class: "quiet", disabled: exporting }),
    button("Save the report", async () => attempt(async () => { said.textContent = `The report is ${(await tell("report")).path}`; }), { class: "quiet" }),
    element("a", { class: "button quiet", href: "/report", target: "_blank", rel: "noopener" }, "Open the report"),
    button("Throw away", decideTo("throw"), { class: "quiet danger", disabled: kept })];
  const lines = [];
  if (kept) lines.push(element("p", { class: "kept" }, "Kept: ", element("b", {}, result.delta), ". What was decided is in decision.json beside it."));
  if (job?.state === "failed") lines.push(element("p", { class: "alert" }, `${capital(job.sentence)}.`));
  if (job?.state === "done") lines.push(element("p", { class: "kept" }, "ONNX: ", element("b", {}, result.onnx ?? `${result.folder}/${result.name}.onnx`)));
  const focused = actions.contains(document.activeElement) ? document.activeElement.textContent : null;
  actions.replaceChildren(element("div", { class: "row" }, ...buttons), ...lines, said);
  if (focused) [...actions.querySelectorAll("button")].find((each) => each.textContent === focused)?.focus();
}

async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    warn(error.message);
  }
}

const act = (name) => () => attempt(async () => {
  studio.pulse.work = await tell(name);
  drawActions();
  drawMore();
});

const decideTo = (what) => () => attempt(async () => {
  if (what === "throw" && !await sure()) return;
  await tell(what);
  studio.pulse = await ask("pulse");
  await load();
  say(what === "keep" ? "the delta is kept" : "thrown away: the network stays as it was");
});

function sure() {
  return new Promise((resolve) => {
    const dialog = element("dialog", { "aria-label": "Throw away?" }, element("p", {}, `Throw away ${result.name}? Labels stay.`),
      element("form", { method: "dialog", class: "row" }, element("button", { value: "yes", class: "quiet danger" }, "Throw away"), element("button", { value: "no", class: "quiet" }, "No")));
    dialog.addEventListener("close", () => { resolve(dialog.returnValue === "yes"); dialog.remove(); });
    document.body.append(dialog);
    dialog.showModal();
  });
}

function scenes() {
  if (!result.scenes.length) return "";
  return element("section", { "aria-label": "Before and after" }, element("h2", {}, "Before and after"),
    ...result.scenes.map((name, number) => element("div", { class: "scene" }, ...["before", "after"].map((when) =>
      element("figure", {}, element("img", { src: `/scene/${when}/${number}?of=${encodeURIComponent(result.name)}`, alt: `${name}, ${when} adaptation` }),
        element("figcaption", {}, `${name}, ${when}`))))));
}

async function drawFlips(looked) {
  drawn.looked = looked;
  if (studio.facts.pixels) return;
  const found = await ask("flips", { start: 0, count: shownFlips });
  const busy = studio.pulse.work.jobs.look?.state === "running";
  if (!found.looked_at) {
    return flips.replaceChildren(element("h2", {}, "Before and after"), element("p", { class: "soft" }, busy ? "The adapted network looks at the other images …" : "There are no other images to look at."));
  }
  const words = `Of ${counted(found.looked_at, "image")} without a label, ${found.changed} ${found.changed === 1 ? "has" : "have"} another answer${busy ? " so far" : ""}.`;
  const rows = found.rows.map((row) => {
    const changed = row.before.label !== row.after.label;
    const look = button(picture(row, "small", "", { lazy: true }), () => go("label", { number: row.number }), { class: "tile", "aria-label": `Label ${row.name}` });
    return element("li", { class: changed ? "changed" : "same" }, look, element("span", { class: "caption" },
      element("span", {}, element("small", { class: "soft" }, "before "), `${row.before.label} `, element("small", {}, percent(row.before.confidence))),
      element("b", {}, element("small", { class: "soft" }, "after "), `${row.after.label} `, element("small", {}, percent(row.after.confidence)))));
  });
  flipped = element("ul", { class: "grid flips" }, ...rows);
  const on = shownFlips < found.looked_at ? element("p", {}, button("Show more", () => { shownFlips = Math.min(200, shownFlips * 2); drawFlips(drawn.looked); }, { class: "quiet", disabled: shownFlips >= 200 })) : "";
  flips.replaceChildren(element("h2", {}, "Before and after"), element("p", {}, words), flipped, on);
}

function suspects() {
  if (!result.suspects.length) return "";
  const rows = result.suspects.map((suspect) => element("li", {},
    button(picture({ number: suspect.number, broken: null }, "small", ""), () => go("label", { number: suspect.number }), { class: "tile", "aria-label": `Look again at the label ${suspect.label_name}` }),
    element("span", { class: "caption" }, element("span", {}, element("small", { class: "soft" }, "label "), suspect.label_name),
      element("b", {}, element("small", { class: "soft" }, "looks like "), `${suspect.predicted_name} `, element("small", {}, percent(suspect.predicted_probability))))));
  return element("section", { "aria-label": "Labels to check" }, element("h2", {}, "Labels to check"),
    element("p", {}, `${counted(result.suspects.length, "label")} ${result.suspects.length === 1 ? "looks" : "look"} wrong. A click goes back to labelling.`),
    element("ul", { class: "grid flips" }, ...rows), result.suspects_words ? element("p", { class: "soft" }, `${capital(result.suspects_words)}.`) : "");
}

function drawMore() {
  const { jobs, curve: points } = studio.pulse.work;
  const job = jobs.curve;
  const parts = [element("h2", {}, "Would more labels help?")];
  if (points) parts.push(element("p", {}, `${capital(points.words)}.`), element("figure", { class: "curve" }, curve(points)), element("p", { class: "soft" }, `${capital(points.luck)}.`));
  else if (job?.state === "running") {
    const left = job.seconds_left === null ? "" : `, about ${duration(job.seconds_left)} left`;
    const bar = element("div", { class: "progress", role: "progressbar", "aria-label": "Learning curve", "aria-valuenow": Math.round(100 * job.share) }, element("i"));
    bar.firstChild.style.width = percent(job.share).replace(" ", "");
    parts.push(bar, element("p", {}, `${percent(job.share)}${left}`), button("Stop", () => attempt(async () => { studio.pulse.work = await tell("stop", { what: "curve" }); drawMore(); }), { class: "quiet" }));
  } else {
    if (job?.state === "failed") parts.push(element("p", { class: "alert" }, `${capital(job.sentence)}.`));
    parts.push(element("p", { class: "soft" }, "The network is adapted many times, to a part of the labels each. That takes longer than adapting."), button("Measure", act("curve"), { class: "quiet" }));
  }
  more.replaceChildren(...parts);
}
