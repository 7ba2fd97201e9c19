//! The user daemon: it owns the socket, the limits, the collection of output and the configuration, and runs each command through a helper of its own.
//!
//! The story of one command is in `run.rs`: request -> spec -> environment -> plan -> helper -> facts -> result. `supervise.rs` watches the helper,
//! `outcome.rs` makes the answer. `server.rs` and `connection.rs` are the way to the clients, `start.rs` the way from the command line to both.
//!
//! It never forks a command itself, applies no confinement, and serves its own user only.
#![forbid(unsafe_code)]

mod channel;
mod cli;
pub mod config;
mod config_text;
mod connection;
mod control;
mod detached;
mod feed;
mod helper;
mod keeper;
mod logging;
mod notify;
mod outbox;
mod outcome;
mod output;
pub mod paths;
mod probe;
mod reap;
mod run;
mod scratch;
mod server;
mod spill;
mod start;
mod state;
mod stdin;
mod supervise;
mod tail;
mod task;
mod task_folder;
mod tasks;
mod terminal;
mod tmpdir;

pub use cli::main;
