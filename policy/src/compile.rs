//! Spec to plan: everything the helper needs, in absolute paths, so that it adds no policy of its own.
use std::path::Path;

use crate::bytes::ByteString;
use crate::environment::ChildEnvironment;
use crate::mode::{SandboxMode, Tier, TmpKind};
use crate::plan::{BUILD_ID, Confinement, Plan};
use crate::policy::{Deployment, SandboxPolicy};
use crate::request::BashExecSpec;

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

/// Set-up takes a few milliseconds; a host that hangs for so long has a broken file system.
const SETUP_DEADLINE_MS: u64 = 10_000;

/// Open for writing in every confining mode.
const DEVICES: [&str; 6] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/dev/tty",
];
/// Open for writing in `workspace-write` too: makes terminals (`script`, `tmux`). The terminals themselves are no root: those of the user's other
/// programs are beside them, so the supervisor opens the command's own.
const TERMINAL_MAKER: &str = "/dev/ptmx";
/// Writable in `workspace-write` besides `/tmp`.
const SHARED_MEMORY: &str = "/dev/shm";
const TMP: &str = "/tmp";

/// Compiles a resolved spec into the helper's plan.
#[must_use]
pub fn compile(spec: &BashExecSpec, environment: ChildEnvironment, inputs: &PlanInputs<'_>) -> Plan {
    let policy = &spec.sandbox_policy;
    // Nothing can be made in `read-only`, so a temporary folder would be an effect of ours.
    let private_tmp = inputs
        .private_tmp
        .clone()
        .filter(|_| policy.mode != SandboxMode::ReadOnly);
    let mut variables = environment.variables;
    // Otherwise bash would believe an inherited name of the same folder, and `pwd` would not be the policy's path.
    variables.insert("PWD".into(), spec.workdir.clone());
    Plan {
        build: BUILD_ID.to_owned(),
        shell: inputs.shell.into(),
        command: spec.command.clone(),
        env: variables.into_iter().collect(),
        workdir: spec.workdir.clone(),
        umask: spec.umask,
        confinement: policy
            .mode
            .confines()
            .then(|| confine(policy, private_tmp.as_ref(), inputs)),
        private_tmp,
        kill_grace_ms: inputs.deployment.kill_grace_ms,
        drain_grace_ms: inputs.deployment.drain_grace_ms,
        setup_deadline_ms: SETUP_DEADLINE_MS,
        max_denials: inputs.deployment.max_denials,
        lifetime: spec.lifetime,
        terminal: spec.tty.is_some(),
    }
}

/// The rules by which a command of this policy would be judged; none when it is not confined.
#[must_use]
pub fn confinement(policy: &SandboxPolicy, inputs: &PlanInputs<'_>) -> Option<Confinement> {
    policy
        .mode
        .confines()
        .then(|| confine(policy, inputs.private_tmp.as_ref(), inputs))
}

fn confine(policy: &SandboxPolicy, private_tmp: Option<&ByteString>, inputs: &PlanInputs<'_>) -> Confinement {
    let writes = policy.mode == SandboxMode::WorkspaceWrite;
    // Only a mount namespace can put another folder in the place of `/tmp`; in the other tier the host's is simply not opened.
    let private_tmp_root = private_tmp
        .filter(|_| policy.tmp == TmpKind::Private && inputs.tier != Tier::Landlock)
        .cloned();
    let opens_tmp = policy.tmp == TmpKind::Shared || private_tmp_root.is_some();
    Confinement {
        mode: policy.mode,
        tier: inputs.tier,
        writable: if writes {
            writable_roots(policy, private_tmp, opens_tmp, inputs.deployment)
        } else {
            Vec::new()
        },
        devices: devices(writes),
        protect: distinct(policy.protect.iter().chain(inputs.daemon_folders).cloned()),
        protect_git: policy.protect_git,
        deny_read: policy.deny_read.clone(),
        allow_unix_socket: policy.allow_unix_socket.clone(),
        network: policy.network,
        require: policy.require.clone(),
        private_tmp_root,
    }
}

/// The workspace first. A root of the deployment that is not on this host is left out: that can only be narrower.
fn writable_roots(
    policy: &SandboxPolicy,
    private_tmp: Option<&ByteString>,
    opens_tmp: bool,
    deployment: &Deployment,
) -> Vec<ByteString> {
    let configured = deployment.writable.iter().filter_map(|root| canonical(root.as_path()));
    let shared = [Some(SHARED_MEMORY), opens_tmp.then_some(TMP)]
        .into_iter()
        .flatten()
        .filter_map(|root| canonical(Path::new(root)));
    distinct(
        std::iter::once(policy.workspace_root.clone())
            .chain(policy.writable.iter().cloned())
            .chain(configured)
            .chain(shared)
            .chain(private_tmp.cloned()),
    )
}

/// Those that this host has. `/dev/ptmx` may be a link into `/dev/pts`.
fn devices(writes: bool) -> Vec<ByteString> {
    let names = DEVICES.iter().copied().chain(writes.then_some(TERMINAL_MAKER));
    distinct(names.filter_map(|name| canonical(Path::new(name))))
}

fn canonical(path: &Path) -> Option<ByteString> {
    path.canonicalize().ok().map(ByteString::from)
}

fn distinct(paths: impl Iterator<Item = ByteString>) -> Vec<ByteString> {
    let mut found = Vec::new();
    for path in paths {
        if !found.contains(&path) {
            found.push(path);
        }
    }
    found
}
