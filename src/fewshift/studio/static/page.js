// Elements, requests and words that all steps share.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  // text is never markup: names of files and classes come from outside
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

async function answer(request) {
  let response;
  try {
    response = await request;
  } catch {
    throw new Refusal("the studio does not answer: start it again in the terminal and open its new address", 0);
  }
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  let sentence = text;
  try {
    sentence = JSON.parse(text).error;
  } catch { /* a sentence that is not JSON */ }
  throw new Refusal(sentence, response.status);
}

export function ask(name, facts = {}) {
  const words = new URLSearchParams(facts).toString();
  return answer(fetch(`/api/${name}${words ? "?" + words : ""}`, { cache: "no-store" }));
}

export function tell(name, facts = {}) {
  const body = JSON.stringify(facts);
  return answer(fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body }));
}

// a reload keeps the name of the tab, and with it what it can undo
export const tab = sessionStorage.getItem("tab") ?? crypto.randomUUID();
sessionStorage.setItem("tab", tab);

let silence;
export function say(words) {
  const status = document.getElementById("status");
  status.textContent = words;
  clearTimeout(silence);
  silence = setTimeout(() => { status.textContent = ""; }, 4000);
}

export function warn(sentence) {
  const close = element("button", { type: "button", class: "quiet", "aria-label": "Close this message" }, "×");
  const alert = element("div", { class: "alert" }, element("p", {}, capital(sentence)), close);
  close.addEventListener("click", () => alert.remove());
  document.getElementById("alerts").replaceChildren(alert);
}

export function calm() {
  document.getElementById("alerts").replaceChildren();
}

export const capital = (words) => words.slice(0, 1).toUpperCase() + words.slice(1);
export const percent = (share) => `${Math.round(100 * share)} %`;
export const counted = (count, one, more = one + "s") => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

export function signed(points) {
  const rounded = Math.round(points);
  return rounded > 0 ? `+${rounded}` : rounded < 0 ? `−${-rounded}` : "0";
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes >= 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes} min`;
}

export function picture(image, size, words, options = {}) {
  if (image.broken) {
    return element("span", { class: "broken", role: "img", "aria-label": `${words} cannot be read` }, element("b", {}, "cannot be read"),
      size === "large" ? element("small", {}, capital(image.broken)) : null);
  }
  const address = `/picture/${image.number}?size=${size}${options.labels ? "&labels=1" : ""}`;
  const shown = element("img", { src: address, alt: words, loading: options.lazy ? "lazy" : null, decoding: "async" });
  shown.addEventListener("load", () => shown.classList.toggle("tiny", shown.naturalWidth <= 128));
  return shown;
}

export function button(words, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, words);
}

// the key of a class: its own digit where classes are digits, otherwise its place
export function keysOf(classes) {
  const digits = classes.length <= 10 && classes.every((name) => /^[0-9]$/.test(name));
  const keys = new Map();
  classes.slice(0, 10).forEach((name, place) => keys.set(digits ? name : String((place + 1) % 10), name));
  return keys;
}
