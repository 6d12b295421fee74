"use strict";
// The tensors, in columns of typed arrays.

const ARRAYS = { b: Int8Array, h: Int16Array, i: Int32Array, f: Float32Array, d: Float64Array };
const packed = JSON.parse(document.getElementById("tensors").textContent);
const tensors = Object.fromEntries(Object.entries(packed).map(([name, each]) => [name, unpackColumn(each)]));

function unpackColumn(packed) {
  if (typeof packed !== "object") return packed;
  const values = unpackNumbers(packed);
  return packed.words ? { words: packed.words, at: values } : values;
}

function unpackNumbers(packed) {
  const bytes = Uint8Array.from(atob(packed.data), (letter) => letter.charCodeAt(0));
  return new ARRAYS[packed.as](bytes.buffer);
}

const word = (name, i) => tensors[name].words[tensors[name].at[i]];

function idOf(i) {
  const call = tensors.call[i] ? `@${tensors.call[i]}` : "";
  const microbatch = tensors.microbatch[i] < 0 ? "-" : tensors.microbatch[i];
  return `${tensors.step[i]}/${microbatch}/${word("name", i)}${call}/${kindOf(i)}`;
}

function kindOf(i) {
  const slot = word("slot", i);
  return slot ? `${word("kind", i)}.${slot}` : word("kind", i);
}

const isWrong = (i) => word("verdict", i) === "FAIL" || word("verdict", i) === "CONFLICT";

// A tensor's error divided by its tolerance.
function ratioOf(i) {
  const worst = Math.max(tensors.error[i], tensors.replicas[i]);
  const scale = Math.abs(tensors.scale[i]) / tensors.scale_tolerance[i];
  if (tensors.tolerance[i] === 0) return worst > 0 ? Infinity : 0;
  return Math.max(worst / tensors.tolerance[i], Number.isFinite(scale) ? scale : 0);
}

// PASS, wrong, or neither: the page distinguishes these three everywhere.
const STATES = ["pass", "wrong", "open"];
function stateOf(i) {
  if (isWrong(i)) return "wrong";
  return word("verdict", i) === "PASS" ? "pass" : "open";
}
