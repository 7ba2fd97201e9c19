//! Vocabulary and pure decisions of the sandboxed shell executor.
//!
//! The way through is the way the data goes: [`request`] (what a caller asks) is resolved by [`resolve`] into a spec, [`environment`] makes the
//! command's environment, [`plan`] is what the helper is told, [`decide`] is how it judges one operation, [`denial`] and [`result`] are what comes back.
//! [`wire`], [`frame`] and [`codec`] carry it. Nothing here forks, opens a socket or touches a running process.
#![forbid(unsafe_code)]

pub mod bytes;
pub mod codec;
mod compile;
pub mod decide;
pub mod denial;
pub mod environment;
pub mod error;
pub mod explain;
pub mod frame;
pub mod git;
pub mod mode;
mod paths;
pub mod plan;
pub mod policy;
pub mod probe;
mod remedy;
pub mod request;
pub mod resolve;
pub mod result;
mod secret_name;
mod secret_setting;
mod secret_value;
mod shell_hook;
pub mod task;
pub mod wire;

pub use bytes::ByteString;
pub use denial::DenialFact;
pub use error::{ErrorCode, ExecError};
pub use mode::SandboxMode;
pub use policy::{Deployment, PolicyRequest, SandboxPolicy};
pub use request::{BashExecRequest, BashExecSpec};
pub use result::BashRunResult;
