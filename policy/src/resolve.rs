//! Request to spec: defaults, caps, bounds and path identity. ([`compile`] makes the plan of the spec.)
//!
//! A request can only narrow what the deployment allows. A mode or network beyond the bound is made narrower and the spec says what had been asked for;
//! a path beyond a bound is an error, because a narrower path would be another one.
use std::path::{Path, PathBuf};

use crate::bytes::ByteString;
use crate::environment::KERNEL_STRING_LIMIT;
use crate::error::{ErrorCode, ExecError};
use crate::mode::{Lifetime, SandboxMode};
use crate::paths;
use crate::policy::{Deployment, PolicyRequest, SandboxPolicy};
use crate::request::{BashExecRequest, BashExecSpec};

pub use crate::compile::{PlanInputs, compile, confinement};

/// What resolution knows about the surroundings of a request.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// The user's home folder, for `~/…`.
    pub home: Option<&'a Path>,
    /// Where the daemon itself stands: the last resort for a working directory.
    pub daemon_workdir: &'a Path,
}

/// Mask of a request that has none.
const DEFAULT_UMASK: u32 = 0o022;

/// Fills in defaults, applies caps and bounds, resolves every path once. Reads the file system, changes nothing. Idempotent.
///
/// # Errors
/// `INVALID_REQUEST`, `WORKDIR_UNUSABLE` or `LIMIT_EXCEEDED`, with a message that says what to do.
pub fn resolve(
    request: &BashExecRequest,
    deployment: &Deployment,
    surroundings: Surroundings<'_>,
) -> Result<BashExecSpec, ExecError> {
    check_command(&request.command)?;
    check_terminal(request)?;
    let asked = request.sandbox_policy.clone().unwrap_or_default();
    let workdir = resolve_workdir(request, &asked, deployment, surroundings)?;
    let sandbox_policy = resolve_policy(&asked, &workdir, deployment, surroundings)?;
    Ok(BashExecSpec {
        command: request.command.clone(),
        workdir: workdir.into(),
        timeout_ms: resolve_timeout(request.timeout_ms, deployment)?,
        stdout_max_bytes: request
            .stdout_max_bytes
            .unwrap_or(deployment.kept_bytes)
            .min(deployment.max_kept_bytes.max(deployment.kept_bytes)),
        sandbox_policy,
        umask: request.umask.unwrap_or(DEFAULT_UMASK) & 0o777,
        lifetime: request.lifetime.unwrap_or(if request.background {
            Lifetime::Session
        } else {
            Lifetime::Foreground
        }),
        tty: request.tty,
        session: request.session.clone(),
    })
}

/// A terminal is typed into by somebody who stays; a text that was sent beforehand would lose what is longer than a line of the kernel's.
fn check_terminal(request: &BashExecRequest) -> Result<(), ExecError> {
    let Some(size) = request.tty else { return Ok(()) };
    size.check("tty")?;
    if request.stdin.is_some() {
        return Err(invalid(
            "invalid stdin: a command with `tty` is typed to while it runs; set `stdinOpen` and send `stdin` messages",
        ));
    }
    if request.background || request.lifetime.unwrap_or_default() != Lifetime::Foreground {
        return Err(invalid(
            "invalid tty: a background command has no terminal, nobody would type; leave `tty` out, or run it in the foreground",
        ));
    }
    Ok(())
}

fn check_command(command: &ByteString) -> Result<(), ExecError> {
    let bytes = command.as_bytes();
    if command.display().trim().is_empty() {
        return Err(invalid("invalid command: expected a non-empty string"));
    }
    if let Some(position) = bytes.iter().position(|byte| *byte == 0) {
        return Err(invalid(format!(
            "invalid command: expected text without NUL bytes, found one at byte {position}"
        )));
    }
    if bytes.len() >= KERNEL_STRING_LIMIT {
        return Err(ExecError::new(
            ErrorCode::LimitExceeded,
            format!(
                "the command has {} bytes, the kernel accepts at most {} as one argument of bash; put it in a file, or send it by stdin to `bash -s`",
                bytes.len(),
                KERNEL_STRING_LIMIT - 1
            ),
        ));
    }
    Ok(())
}

fn resolve_timeout(asked: Option<u64>, deployment: &Deployment) -> Result<u64, ExecError> {
    match asked {
        Some(0) => Err(invalid("invalid timeoutMs: expected a positive number, got 0")),
        Some(asked) => Ok(asked.min(deployment.max_timeout_ms)),
        None => Ok(deployment.default_timeout_ms.min(deployment.max_timeout_ms)),
    }
}

/// Explicit absolute; explicit relative to the session's workspace; the workspace; the configured folder; the daemon's own.
fn resolve_workdir(
    request: &BashExecRequest,
    asked: &PolicyRequest,
    deployment: &Deployment,
    surroundings: Surroundings<'_>,
) -> Result<PathBuf, ExecError> {
    if let Some(root) = &asked.workspace_root {
        require_absolute("workspaceRoot", root)?;
    }
    let base = asked
        .workspace_root
        .as_ref()
        .or(deployment.workdir.as_ref())
        .map_or_else(|| surroundings.daemon_workdir.to_path_buf(), ByteString::to_path_buf);
    // Joining an absolute path gives that path.
    let path = request
        .workdir
        .as_ref()
        .map_or(base.clone(), |workdir| base.join(workdir.as_path()));
    paths::usable_folder(&path).map_err(|reason| {
        ExecError::new(
            ErrorCode::WorkdirUnusable,
            format!("cannot use working directory {}: {reason}", path.to_string_lossy()),
        )
    })
}

fn resolve_policy(
    asked: &PolicyRequest,
    workdir: &Path,
    deployment: &Deployment,
    surroundings: Surroundings<'_>,
) -> Result<SandboxPolicy, ExecError> {
    let wanted_mode = asked.mode.unwrap_or(deployment.default_mode.min(deployment.max_mode));
    let mode = wanted_mode.min(deployment.max_mode);
    let wanted_network = asked.network.unwrap_or(deployment.network);
    let network = wanted_network.min(deployment.network);
    let workspace_root = match &asked.workspace_root {
        Some(root) => usable("workspaceRoot", root, paths::usable_folder(root.as_path()))?,
        None => workdir.to_path_buf(),
    };
    let named = Names {
        home: surroundings.home,
        workspace: &workspace_root,
    };
    let writable = resolve_writable(&asked.writable, &named)?;
    if mode == SandboxMode::WorkspaceWrite {
        check_bounds("workspaceRoot", &workspace_root, deployment)?;
        for root in &writable {
            check_bounds("writable", root.as_path(), deployment)?;
        }
    }
    Ok(SandboxPolicy {
        mode,
        requested_mode: (wanted_mode != mode).then_some(wanted_mode),
        protect: named.protected(asked.protect.iter().chain(&deployment.protect))?,
        deny_read: named.targets("denyRead", asked.deny_read.iter().chain(&deployment.deny_read))?,
        allow_unix_socket: resolve_sockets(&asked.allow_unix_socket, deployment, &named)?,
        workspace_root: workspace_root.into(),
        writable,
        protect_git: deployment.protect_git && mode == SandboxMode::WorkspaceWrite,
        network,
        requested_network: (wanted_network != network).then_some(wanted_network),
        tmp: asked.tmp.unwrap_or(deployment.tmp).min(deployment.tmp),
        require: deployment.require.clone(),
    })
}

/// How the names in a policy are read.
struct Names<'a> {
    home: Option<&'a Path>,
    workspace: &'a Path,
}

impl Names<'_> {
    fn absolute(&self, field: &str, path: &ByteString) -> Result<PathBuf, ExecError> {
        let expanded = paths::expand_home(path, self.home).ok_or_else(|| {
            invalid(format!(
                "invalid {field}: {} cannot be resolved, the home folder is not known",
                path.display()
            ))
        })?;
        require_absolute(field, &expanded.as_path().into())?;
        Ok(expanded)
    }

    /// What each path leads to, whether or not it exists yet; each once.
    fn targets<'p>(
        &self,
        field: &str,
        list: impl Iterator<Item = &'p ByteString>,
    ) -> Result<Vec<ByteString>, ExecError> {
        let mut found = Vec::new();
        for path in list {
            push_new(&mut found, paths::as_far_as_it_exists(&self.absolute(field, path)?));
        }
        Ok(found)
    }

    /// Protects what a path leads to, and also the name itself when it is a link: exchanging the link would be as good as changing the target.
    fn protected<'p>(&self, list: impl Iterator<Item = &'p ByteString>) -> Result<Vec<ByteString>, ExecError> {
        let mut found = Vec::new();
        for path in list {
            let expanded = paths::expand_home(path, self.home).ok_or_else(|| {
                invalid(format!(
                    "invalid protect: {} cannot be resolved, the home folder is not known",
                    path.display()
                ))
            })?;
            reject_nul("protect", path)?;
            let path = self.workspace.join(expanded);
            if let Some(itself) = paths::entry_itself(&path) {
                push_new(&mut found, itself);
            }
            push_new(&mut found, paths::as_far_as_it_exists(&path));
        }
        Ok(found)
    }
}

fn push_new(list: &mut Vec<ByteString>, path: PathBuf) {
    let path = ByteString::from(path);
    if !list.contains(&path) {
        list.push(path);
    }
}

/// A root that is not there is an error that names it: leaving it out in silence would surprise later.
fn resolve_writable(asked: &[ByteString], named: &Names<'_>) -> Result<Vec<ByteString>, ExecError> {
    let mut found = Vec::new();
    for path in asked {
        let absolute = named.absolute("writable", path)?;
        push_new(&mut found, usable("writable", path, paths::existing(&absolute))?);
    }
    Ok(found)
}

/// A socket of the host is a way out of the sandbox: unless requests may leave it anyway, they can only name what the deployment lists.
fn resolve_sockets(
    asked: &[ByteString],
    deployment: &Deployment,
    named: &Names<'_>,
) -> Result<Vec<ByteString>, ExecError> {
    let allowed = named.targets("allowUnixSocket", deployment.allow_unix_socket.iter())?;
    let asked = named.targets("allowUnixSocket", asked.iter())?;
    let is_allowed = |path: &ByteString| {
        deployment.max_mode == SandboxMode::DangerFullAccess
            || allowed
                .iter()
                .any(|folder| crate::decide::is_within(folder.as_bytes(), path.as_bytes()))
    };
    if let Some(path) = asked.iter().find(|path| !is_allowed(path)) {
        return Err(invalid(format!(
            "invalid allowUnixSocket: {} is not among the sockets that this deployment allows ({})",
            path.display(),
            listed(&allowed)
        )));
    }
    let mut found = asked;
    for path in allowed {
        push_new(&mut found, path.to_path_buf());
    }
    Ok(found)
}

fn check_bounds(field: &str, path: &Path, deployment: &Deployment) -> Result<(), ExecError> {
    let Some(bounds) = &deployment.writable_bounds else {
        return Ok(());
    };
    if bounds
        .iter()
        .any(|bound| path.starts_with(paths::as_far_as_it_exists(bound.as_path())))
    {
        return Ok(());
    }
    Err(invalid(format!(
        "invalid {field}: {} is outside of what this deployment lets requests write to ({})",
        path.to_string_lossy(),
        listed(bounds)
    )))
}

fn listed(paths: &[ByteString]) -> String {
    if paths.is_empty() {
        return "none".to_owned();
    }
    paths.iter().map(ByteString::display).collect::<Vec<_>>().join(", ")
}

fn require_absolute(field: &str, path: &ByteString) -> Result<(), ExecError> {
    reject_nul(field, path)?;
    if path.as_path().is_absolute() {
        return Ok(());
    }
    Err(invalid(format!(
        "invalid {field}: expected an absolute path, got {}",
        path.display()
    )))
}

fn reject_nul(field: &str, path: &ByteString) -> Result<(), ExecError> {
    if path.as_bytes().contains(&0) {
        return Err(invalid(format!(
            "invalid {field}: {} has a NUL byte",
            path.as_bytes().escape_ascii()
        )));
    }
    Ok(())
}

fn usable(field: &str, path: &ByteString, found: Result<PathBuf, String>) -> Result<PathBuf, ExecError> {
    found.map_err(|reason| invalid(format!("invalid {field}: cannot use {}: {reason}", path.display())))
}

fn invalid(message: impl Into<String>) -> ExecError {
    ExecError::new(ErrorCode::InvalidRequest, message)
}
