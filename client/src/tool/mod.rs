//! The layer that models see: the `bash` tool from the arguments of a call to the text of its result.
//!
//! The way of a call: [`arguments`] says what was asked for, [`escalate`] whether a wider mode is granted, [`bash`] runs it, [`render`] gives the text.
//! [`schema`] and [`prompt`] are what a model is told beforehand, [`environment`] who sets which `DSH_*` variable of a command, [`session`] which workspace and
//! mode a caller's session has, [`task`] how background tasks are told, [`present`] how a call is shown to a person.
pub mod arguments;
pub mod bash;
pub mod environment;
pub mod error;
pub mod escalate;
mod log;
pub mod present;
pub mod prompt;
pub mod render;
pub mod schema;
pub mod session;
pub mod task;
pub mod task_tools;

pub use log::LogError;
