//! Connections to the sandboxed shell executor, the tool layer that models see, and the command line.
//!
//! [`blocking::Client`] needs no runtime; [`connection::Connection`] runs many commands at once under tokio. Both send the caller's environment already
//! scrubbed. How a command is confined is the daemon's business and not known here.
#![forbid(unsafe_code)]

pub mod address;
pub mod ambient;
pub mod blocking;
pub mod cli;
pub mod connection;
pub mod error;
pub mod mcp;
pub mod start;
pub mod tool;

pub use error::ClientError;
