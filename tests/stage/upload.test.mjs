import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { test } from "node:test";
import { gunzipSync, gzipSync } from "node:zlib";

import { packTraceFile } from "../../app/stage/upload.js";

const LIMITS = { sent: 1 << 20, unpacked: 4 << 20 };
const bytesOf = (base64) => Buffer.from(base64, "base64");

test("a plain file is gzipped on its way, and a gzipped one is sent as it is", async () => {
  const text = JSON.stringify({ trace_version: 1, words: "🌊 ".repeat(50_000) });
  assert.equal(gunzipSync(bytesOf(await packTraceFile(new File([text], "a.json"), LIMITS))).toString(), text);
  const packed = gzipSync(text);
  assert.deepEqual(bytesOf(await packTraceFile(new File([packed], "a.json.gz"), LIMITS)), packed);
});

test("a file that is too large is refused in a sentence, before or after compression", async () => {
  await assert.rejects(packTraceFile(new File([new Uint8Array((4 << 20) + 1)], "big.json"), LIMITS), /^Error: big\.json is larger than 4 MB/);
  const file = new File([randomBytes((1 << 20) + 1)], "noise.bin");
  await assert.rejects(packTraceFile(file, LIMITS), /^Error: noise\.bin is larger than 1 MB when compressed/);
});

test("a file that cannot be read is told by its name", async () => {
  const gone = { name: "gone.json", size: 1, arrayBuffer: () => Promise.reject(new Error("moved")) };
  await assert.rejects(packTraceFile(gone, LIMITS), /^Error: gone\.json could not be read/);
});
