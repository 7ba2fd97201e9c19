//! Request to spec: defaults, caps, bounds and path identity. And spec to plan.
use std::path::Path;

use crate::bytes::ByteString;
use crate::environment::ChildEnvironment;
use crate::error::ExecError;
use crate::mode::Tier;
use crate::plan::Plan;
use crate::policy::Deployment;
use crate::request::{BashExecRequest, BashExecSpec};

/// What resolution knows about the surroundings of a request.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// The user's home folder, for `~/…`.
    pub home: Option<&'a Path>,
    /// Where the daemon itself stands: the last resort for a working directory.
    pub daemon_workdir: &'a Path,
}

/// Fills in defaults, applies caps and bounds, resolves every path once. Reads the file system, changes nothing. Idempotent.
///
/// # Errors
/// `INVALID_REQUEST`, `WORKDIR_UNUSABLE` or `LIMIT_EXCEEDED`, with a message that says what to do.
pub fn resolve(
    request: &BashExecRequest,
    deployment: &Deployment,
    surroundings: Surroundings<'_>,
) -> Result<BashExecSpec, ExecError> {
    let _ = (request, deployment, surroundings);
    todo!()
}

/// What the daemon adds to a spec to make a plan of it.
#[derive(Clone, Debug)]
pub struct PlanInputs<'a> {
    /// `bash`, absolute.
    pub shell: &'a Path,
    /// The tier of this host; ignored for `danger-full-access`.
    pub tier: Tier,
    /// The private temporary folder of this command, not made yet.
    pub private_tmp: Option<ByteString>,
    /// Canonical folders that belong to the daemon (state, spill, socket): protected in every writable root.
    pub daemon_folders: &'a [ByteString],
    /// Bounds and graces.
    pub deployment: &'a Deployment,
}

/// Compiles a resolved spec into the helper's plan.
#[must_use]
pub fn compile(spec: &BashExecSpec, environment: ChildEnvironment, inputs: &PlanInputs<'_>) -> Plan {
    let _ = (spec, environment, inputs);
    todo!()
}
