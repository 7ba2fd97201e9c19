//! The axes of confinement: how wide file effects may be, what the network may reach, how `/tmp` is shared, which tier enforces.

/// Defines an enum whose text form is the same in JSON, in TOML, on the command line and in messages.
macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize, crate::codec::Encode, crate::codec::Decode)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub enum $name { $($(#[$vmeta])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            /// Every value, narrowest or first first.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The text that programs match on.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = crate::mode::UnknownName;
            fn from_str(text: &str) -> Result<Self, crate::mode::UnknownName> {
                Self::ALL.iter().copied().find(|value| value.as_str() == text).ok_or_else(|| crate::mode::UnknownName {
                    given: text.to_owned(),
                    expected: Self::ALL.iter().map(|value| value.as_str()).collect::<Vec<_>>().join(", "),
                })
            }
        }
    };
}
pub(crate) use named_enum;

/// A word that names no value of an axis.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not one of: {expected}")]
pub struct UnknownName {
    /// What was given.
    pub given: String,
    /// What would have been accepted.
    pub expected: String,
}

named_enum! {
    /// How wide a command's effects on files may be. Ordered: a later value is strictly wider.
    #[derive(Default)]
    SandboxMode {
        /// No file on the host can be created, changed or removed.
        #[default]
        ReadOnly = "read-only",
        /// Writes only below the workspace, `/tmp`, the private `TMPDIR`, `/dev/shm` and configured roots.
        WorkspaceWrite = "workspace-write",
        /// Not confined.
        DangerFullAccess = "danger-full-access",
    }
}

named_enum! {
    /// What a command can reach over the network. Ordered: a later value is strictly wider.
    Network {
        /// Nothing, not even its own loopback.
        None = "none",
        /// A loopback of its own and nothing else.
        Loopback = "loopback",
        /// Whatever the host can reach.
        Full = "full",
    }
}

named_enum! {
    /// Which `/tmp` a command sees.
    TmpKind {
        /// A fresh one per session.
        Private = "private",
        /// The host's.
        Shared = "shared",
    }
}

named_enum! {
    /// Which mechanism enforces a policy on this host.
    Tier {
        /// User, mount, pid and ipc namespaces (net when restricted), with Landlock and seccomp underneath.
        Namespace = "namespace",
        /// Landlock and seccomp, metadata mediated by the supervisor.
        Landlock = "landlock",
        /// Namespaces and seccomp, for kernels without Landlock.
        Mount = "mount",
    }
}

named_enum! {
    /// What may outlive what.
    #[derive(Default)]
    Lifetime {
        /// Dies with the request or its connection.
        #[default]
        Foreground = "foreground",
        /// A background task that dies with its session.
        Session = "session",
        /// Survives its client and a restart of the daemon.
        Detached = "detached",
    }
}

named_enum! {
    /// Whether everything the policy asks for is enforced.
    EnforcementLevel {
        /// All of it.
        Full = "full",
        /// Part of it; `unenforced` names the rest.
        Partial = "partial",
    }
}

named_enum! {
    /// One promise that a tier keeps or does not keep on a given kernel.
    Guarantee {
        /// Creating, writing, truncating, removing, renaming and linking files outside the writable roots is refused.
        FileWrites = "file-writes",
        /// Changing mode, owner, times, extended attributes and flags outside the writable roots is refused.
        FileMetadata = "file-metadata",
        /// Protected paths inside writable roots stay as they are, also against a racing program.
        ProtectedPaths = "protected-paths",
        /// Listed paths cannot be read.
        DenyRead = "deny-read",
        /// The network axis holds.
        Network = "network",
        /// Unix sockets of the host cannot be reached by path.
        UnixSockets = "unix-sockets",
        /// Abstract Unix sockets of the host cannot be reached.
        AbstractSockets = "abstract-sockets",
        /// Processes outside cannot be signalled, traced, limited or rescheduled.
        Processes = "processes",
        /// System V IPC, POSIX queues and keyrings of the user cannot be reached.
        Ipc = "ipc",
        /// Refused operations are observed and reported as facts.
        Facts = "facts",
        /// `/tmp` is private when the policy says so.
        PrivateTmp = "private-tmp",
        /// Resource limits hold.
        Limits = "limits",
        /// Device commands (`ioctl`) on devices outside the allowed ones are refused.
        DeviceIoctl = "device-ioctl",
    }
}

impl SandboxMode {
    /// Whether `self` permits strictly more than `other`.
    #[must_use]
    pub fn is_strictly_wider_than(self, other: Self) -> bool {
        self > other
    }

    /// Whether commands in this mode are confined at all.
    #[must_use]
    pub fn confines(self) -> bool {
        self != Self::DangerFullAccess
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_width_is_the_contract_s() {
        use SandboxMode::{DangerFullAccess, ReadOnly, WorkspaceWrite};
        assert!(
            WorkspaceWrite.is_strictly_wider_than(ReadOnly) && DangerFullAccess.is_strictly_wider_than(WorkspaceWrite)
        );
        assert!(!ReadOnly.is_strictly_wider_than(ReadOnly));
    }

    #[test]
    fn a_name_is_the_same_everywhere_and_an_unknown_one_says_what_is_known() {
        for mode in SandboxMode::ALL {
            assert_eq!(mode.as_str().parse::<SandboxMode>().unwrap(), *mode);
            assert_eq!(serde_json::to_string(mode).unwrap(), format!("\"{mode}\""));
        }
        let error = "wide".parse::<SandboxMode>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "`wide` is not one of: read-only, workspace-write, danger-full-access"
        );
    }
}
