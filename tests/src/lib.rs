//! The harness: a real daemon in a folder of its own, the real `dsh-exec` before it, the real kernel below it.
//!
//! A [`World`] has a home, a workspace, an outside folder, a runtime folder and copies of the four binaries, all owned by one user; tests that run as root
//! repeat everything as an ordinary user ([`users`]). Nothing is faked: no stand-in for the kernel, the socket or the helper.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a harness reports by panicking: the test fails where it stands

pub mod binaries;
pub mod doors;
pub mod fixture;
pub mod machine;
pub mod outside;
pub mod process;
pub mod tree;
pub mod wire;
pub mod world;

pub use world::{Ran, User, World, users};
