//! The layer that models see: the `bash` tool from the arguments of a call to the text of its result.
//!
//! The way of a call: [`arguments`] says what was asked for, [`escalate`] whether a wider mode is granted, [`bash`] runs it, [`render`] gives the text.
//! [`schema`] is what a model is told beforehand, [`environment`] who sets which `DSH_*` variable of a command.
pub mod arguments;
pub mod bash;
pub mod environment;
pub mod error;
pub mod escalate;
pub mod render;
pub mod schema;
