import assert from "node:assert/strict";
import { test } from "node:test";

import { linkTo, placeOf, readLink } from "../../app/stage/link.js";

const TRACE = { lanes: [{ id: "backbone", tokens: [{}, {}, {}] }, { id: "river-2", tokens: [{}] }] };

test("a link and the address that it makes are each other's inverse", () => {
  const url = linkTo("https://host/app/?__theme=dark&token=9", "holes", { lane: "river-2", i: 36 });
  assert.equal(url, "https://host/app/?recording=holes&lane=river-2&token=37");
  assert.deepEqual(readLink(new URL(url).search), { slug: "holes", lane: "river-2", token: "37" });
  assert.equal(linkTo(url, null, { lane: "river", i: 1 }), "https://host/app/");
  assert.equal(linkTo(url, "holes", null), "https://host/app/?recording=holes");
});

test("a link that is passed on carries nothing of the visitor's own address, which keeps it", () => {
  const own = "https://host/app/?__sign=secret&__theme=dark&recording=x";
  assert.ok(!linkTo(own, "holes", null).includes("secret"));
  assert.equal(linkTo(own, "holes", null, { keep: true }), "https://host/app/?__sign=secret&__theme=dark&recording=holes");
});

test("a query without a recording is no link", () => {
  assert.equal(readLink("?lane=river&token=3"), null);
  assert.equal(readLink(""), null);
});

test("a link names a lane and a token of the trace, counted from one, or nothing", () => {
  assert.deepEqual(placeOf(readLink("?recording=x"), TRACE), {});
  assert.deepEqual(placeOf(readLink("?recording=x&lane=backbone&token=3"), TRACE), { lane: "backbone", token: 2 });
  assert.deepEqual(placeOf(readLink("?recording=x&lane=backbone"), TRACE), { lane: "backbone", token: 0 });
});

test("what a link names and the trace does not have is said in a sentence", () => {
  for (const search of ["lane=nobody&token=1", "token=2", "lane=backbone&token=4", "lane=backbone&token=0", "lane=backbone&token=1.5", "lane=river-2&token=x"]) {
    assert.match(placeOf(readLink(`?recording=x&${search}`), TRACE).error, /^The link names no (lane|token) .*so it opens at the start\.$/);
  }
});
