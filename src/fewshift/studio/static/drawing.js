// Pictures drawn from numbers: the interval of a gain, and a learning curve.

import { signed } from "/static/page.js";

const SPACE = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function canvas(width, height, words) {
  return shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
}

// round numbers that divide a span into a few steps
function ticks(low, high, most = 6) {
  const rough = (high - low) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9; at += step) found.push(Math.round(at * 1e6) / 1e6);
  return found;
}

// a picture as wide as it will be shown, so that its letters keep their size
const broad = () => Math.min(560, document.documentElement.clientWidth - 60);

export function interval(gain) {
  const width = broad(), height = 96, left = 20, right = width - 20, line = 44;
  const reach = Math.max(5, Math.abs(gain.low), Math.abs(gain.high)) * 1.12;
  const low = Math.min(-reach * 0.25, gain.low * 1.12), high = Math.max(reach * 0.25, gain.high * 1.12);
  const at = (points) => left + (right - left) * (points - low) / (high - low);
  const picture = canvas(width, height, `The true change is probably between ${signed(gain.low)} and ${signed(gain.high)} points; the best guess is ${signed(gain.point)}.`);
  picture.append(shape("line", { class: "axis", x1: left, x2: right, y1: line + 22, y2: line + 22 }));
  for (const tick of ticks(low, high, width < 400 ? 4 : 6)) {
    picture.append(shape("line", { class: "axis", x1: at(tick), x2: at(tick), y1: line + 22, y2: line + 27 }), shape("text", { class: "tick", x: at(tick), y: line + 42 }, signed(tick)));
  }
  picture.append(shape("line", { class: "zero", x1: at(0), x2: at(0), y1: 10, y2: line + 22 }));
  const kind = gain.low > 0 ? "up" : gain.high < 0 ? "down" : "open";
  picture.append(shape("rect", { class: `span ${kind}`, x: at(gain.low), width: Math.max(2, at(gain.high) - at(gain.low)), y: line - 7, height: 14, rx: 7 }),
    shape("circle", { class: `dot ${kind}`, cx: at(gain.point), cy: line, r: 7 }),
    shape("text", { class: "value", x: at(gain.point), y: line - 16 }, `${signed(gain.point)} points`));
  return picture;
}

export function curve(facts) {
  const width = broad(), height = 260, left = 44, right = width - 20, top = 16, bottom = 210;
  const points = facts.points;
  const values = points.flatMap((point) => [point.lowest, point.highest, point.mean, 0]);
  let low = Math.min(...values), high = Math.max(...values);
  const room = Math.max(1, (high - low) * 0.08);
  low -= room;
  high += room;
  const x = (place) => points.length === 1 ? (left + right) / 2 : left + 20 + (right - left - 40) * place / (points.length - 1);
  const y = (gain) => bottom - (bottom - top) * (gain - low) / (high - low);
  const words = points.map((point) => `${signed(point.mean)} points with ${point.shots}`).join(", ");
  const picture = canvas(width, height, `Gain by number of labels: ${words}.`);
  for (const tick of ticks(low, high, 5)) {
    picture.append(shape("line", { class: tick === 0 ? "zero" : "grid-line", x1: left, x2: right, y1: y(tick), y2: y(tick) }), shape("text", { class: "tick end", x: left - 8, y: y(tick) + 4 }, signed(tick)));
  }
  picture.append(shape("polyline", { class: "mean", points: points.map((point, place) => `${x(place)},${y(point.mean)}`).join(" ") }));
  points.forEach((point, place) => {
    picture.append(shape("line", { class: "range", x1: x(place), x2: x(place), y1: y(point.lowest), y2: y(point.highest) }),
      shape("circle", { class: "dot", cx: x(place), cy: y(point.mean), r: 5 }), shape("text", { class: "tick", x: x(place), y: bottom + 20 }, String(point.shots)));
  });
  picture.append(shape("text", { class: "tick", x: (left + right) / 2, y: bottom + 42 }, `k, ${facts.unit}; gain in points, mean and range`));
  return picture;
}
