#!/usr/bin/env node
// Runs a command through dsh-execd, without dependencies. The protocol: docs/protocol.md.
//
//     client.mjs [--mode MODE] [--workspace DIR] [--socket PATH] COMMAND
import net from "node:net";
import os from "node:os";
import path from "node:path";
import { parseArgs } from "node:util";

const FRAME_LIMIT = 16 * 1024 * 1024;

/** One connection: frames of JSON, each after its length as four bytes, least significant first. */
class Daemon {
  #socket;
  #received = Buffer.alloc(0);
  #messages = [];
  #waiting = [];
  #ended = false;

  static async connect(socketPath) {
    const daemon = new Daemon();
    daemon.#socket = net.connect(socketPath);
    daemon.#socket.on("data", (data) => daemon.#take(data));
    daemon.#socket.on("error", (error) => daemon.#end(error));
    daemon.#socket.on("close", () => daemon.#end(new Error("the daemon closed the connection; the fate of the command is unknown")));
    daemon.send({ protocol: { major: 1, minor: 0 }, encoding: "json", client: "client.mjs" });
    const hello = await daemon.receive();
    if (hello.error) throw new Error(`refused: ${hello.error.message}`);
    return daemon;
  }

  send(message) {
    const payload = Buffer.from(JSON.stringify(message));
    const length = Buffer.alloc(4);
    length.writeUInt32LE(payload.length);
    this.#socket.write(Buffer.concat([length, payload]));
  }

  receive() {
    if (this.#messages.length > 0) return Promise.resolve(this.#messages.shift());
    if (this.#ended) return Promise.reject(this.#ended);
    return new Promise((resolve, reject) => this.#waiting.push({ resolve, reject }));
  }

  close() {
    this.#socket.end();
  }

  #take(data) {
    this.#received = Buffer.concat([this.#received, data]);
    while (this.#received.length >= 4) {
      const length = this.#received.readUInt32LE();
      if (length > FRAME_LIMIT) return this.#socket.destroy(new Error("the daemon sent a frame that is too long"));
      if (this.#received.length < 4 + length) return;
      const message = JSON.parse(this.#received.subarray(4, 4 + length));
      this.#received = this.#received.subarray(4 + length);
      const waiting = this.#waiting.shift();
      if (waiting) waiting.resolve(message);
      else this.#messages.push(message);
    }
  }

  #end(error) {
    this.#ended ||= error;
    for (const waiting of this.#waiting.splice(0)) waiting.reject(this.#ended);
  }

  /** Yields every event of a command; the last is `finished` or `error`. */
  async *run(request) {
    this.send({ type: "run", id: 1, stream: true, request });
    for (;;) {
      const message = await this.receive();
      if (message.id !== undefined && message.id !== 1) continue;
      yield message;
      if (message.type === "finished" || message.type === "error") return;
    }
  }
}

/** Bytes are text in JSON when they are UTF-8, and an object with `base64` when they are not. */
const raw = (value) => (typeof value === "string" ? Buffer.from(value) : Buffer.from(value.base64, "base64"));

const string = { type: "string" };
const { values, positionals } = parseArgs({ options: { mode: string, workspace: string, socket: string }, allowPositionals: true });
const runtime = process.env.XDG_RUNTIME_DIR;
const folder = runtime ? path.join(runtime, "dsh-execd") : `/tmp/dsh-execd-${process.getuid()}`;
const daemon = await Daemon.connect(values.socket ?? path.join(folder, "socket"));
const request = {
  command: positionals[0],
  ambientEnv: { ...process.env },
  sandboxPolicy: { mode: values.mode ?? "read-only", workspaceRoot: path.resolve(values.workspace ?? ".") },
};
for await (const event of daemon.run(request)) {
  if (event.type === "output") (event.stream === "stdout" ? process.stdout : process.stderr).write(raw(event.data));
  if (event.type === "error") {
    process.stderr.write(`not run: ${event.error.message}\n`);
    process.exitCode = 1;
  }
  if (event.type === "finished") {
    for (const fact of event.result.sandbox.denials ?? []) {
      process.stderr.write(`refused: ${fact.operation} ${fact.errno} ${fact.path ?? ""}\n`);
    }
    process.exitCode = event.result.signal ? 128 + os.constants.signals[event.result.signal] : event.result.exitCode;
  }
}
daemon.close();
