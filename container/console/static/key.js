// The key that a server may ask for; this page alone keeps it.

import { $ } from "./dom.js";

let key = "";

export const useKey = (text) => (key = text.trim());

// What is shown of it.
export const keyHeader = () => (key ? { authorization: "Bearer KEY" } : {});

// `fetch` with the key. Where the server wants another one, the page asks for it.
export async function call(url, options) {
	const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
	const reply = await fetch(url, { ...options, headers });
	$("#key").hidden = reply.status !== 401;
	return reply;
}
