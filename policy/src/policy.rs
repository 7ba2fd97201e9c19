//! The policy document: what a request may ask for, and what the operator allows at most.
use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::mode::{Guarantee, Network, SandboxMode, TmpKind};

/// What a request asks for. Every axis that is absent takes the deployment's default.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyRequest {
    /// How wide file effects may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<SandboxMode>,
    /// The folder that `workspace-write` opens for writing; relative working directories are resolved against it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace_root: Option<ByteString>,
    /// More folders (or files) that `workspace-write` opens for writing, absolute.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writable: Vec<ByteString>,
    /// More paths inside writable roots that stay as they are; relative ones are below the workspace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub protect: Vec<ByteString>,
    /// More paths that cannot be read, absolute or `~/…`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny_read: Vec<ByteString>,
    /// Unix sockets of the host that may be reached although the tier or network would close them, absolute.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow_unix_socket: Vec<ByteString>,
    /// What the network may reach; may only be narrower than the deployment's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// Which `/tmp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tmp: Option<TmpKind>,
}

/// What the operator set: defaults for what a request leaves open, and bounds that no request can widen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Mode of a request that names none.
    pub default_mode: SandboxMode,
    /// Widest mode a request can get.
    pub max_mode: SandboxMode,
    /// Network of a request that names none, and the widest a request can get.
    pub network: Network,
    /// `/tmp` of a request that names none; a request may only go from shared to private.
    pub tmp: TmpKind,
    /// Roots that are writable in `workspace-write` besides the workspace, absolute.
    pub writable: Vec<ByteString>,
    /// When set, a request's workspace and extra roots must lie below one of these, absolute.
    pub writable_bounds: Option<Vec<ByteString>>,
    /// Paths that stay as they are in every request.
    pub protect: Vec<ByteString>,
    /// Whether git metadata that a later `git` on the host would execute or trust is protected in `workspace-write`.
    pub protect_git: bool,
    /// Paths that cannot be read, absolute.
    pub deny_read: Vec<ByteString>,
    /// Unix sockets that may be reached, absolute.
    pub allow_unix_socket: Vec<ByteString>,
    /// Guarantees without which nothing runs.
    pub require: Vec<Guarantee>,
    /// Working directory when neither the request nor its session has one, absolute.
    pub workdir: Option<ByteString>,
    /// Time limit of a request that names none, milliseconds.
    pub default_timeout_ms: u64,
    /// Longest time limit, milliseconds.
    pub max_timeout_ms: u64,
    /// Bytes of each stream kept in memory and in the result.
    pub kept_bytes: u64,
    /// Most that `stdoutMaxBytes` can raise the kept part to.
    pub max_kept_bytes: u64,
    /// Largest spill file per stream, bytes.
    pub spill_bytes: u64,
    /// Between SIGTERM and SIGKILL, milliseconds.
    pub kill_grace_ms: u64,
    /// How long descendants that outlive the shell may hold the result, milliseconds.
    pub drain_grace_ms: u64,
    /// Most distinct facts kept per command.
    pub max_denials: u32,
}

impl Default for Deployment {
    /// The `compatible` preset of the contract.
    fn default() -> Self {
        Self {
            default_mode: SandboxMode::ReadOnly,
            max_mode: SandboxMode::DangerFullAccess,
            network: Network::Full,
            tmp: TmpKind::Shared,
            writable: Vec::new(),
            writable_bounds: None,
            protect: Vec::new(),
            protect_git: true,
            deny_read: Vec::new(),
            allow_unix_socket: Vec::new(),
            require: Vec::new(),
            workdir: None,
            default_timeout_ms: 120_000,
            max_timeout_ms: 600_000,
            kept_bytes: 64_000,
            max_kept_bytes: 16 * 1024 * 1024,
            spill_bytes: 64 * 1024 * 1024,
            kill_grace_ms: 3_000,
            drain_grace_ms: 250,
            max_denials: 1_000,
        }
    }
}

/// The policy of one command after resolution: every axis present, every path absolute and canonical.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxPolicy {
    /// How wide file effects may be.
    pub mode: SandboxMode,
    /// What the request asked for, when a bound of the deployment made it narrower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_mode: Option<SandboxMode>,
    /// The folder open for writing in `workspace-write`; the same identity as the working directory when that is the default.
    pub workspace_root: ByteString,
    /// Further writable roots, canonical.
    #[serde(default)]
    pub writable: Vec<ByteString>,
    /// Paths that stay as they are, absolute (they need not exist).
    #[serde(default)]
    pub protect: Vec<ByteString>,
    /// Whether git metadata is protected.
    pub protect_git: bool,
    /// Paths that cannot be read, absolute.
    #[serde(default)]
    pub deny_read: Vec<ByteString>,
    /// Unix sockets that may be reached, absolute.
    #[serde(default)]
    pub allow_unix_socket: Vec<ByteString>,
    /// What the network may reach.
    pub network: Network,
    /// What the request asked for, when the deployment's bound made it narrower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_network: Option<Network>,
    /// Which `/tmp`.
    pub tmp: TmpKind,
    /// Guarantees without which nothing runs.
    #[serde(default)]
    pub require: Vec<Guarantee>,
}
