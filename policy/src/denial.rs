//! What the sandbox refused, as facts.
use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::mode::named_enum;

named_enum! {
    /// What a program tried to do. The errno it gets is a function of this and nothing else: see [`Operation::errno`].
    Operation {
        /// Read a file or folder that `denyRead` lists.
        ReadFile = "read-file",
        /// Open an existing file for writing.
        WriteFile = "write-file",
        /// Create a file.
        CreateFile = "create-file",
        /// Cut a file to a length.
        Truncate = "truncate",
        /// Create a folder.
        MakeDir = "make-dir",
        /// Remove a file.
        RemoveFile = "remove-file",
        /// Remove a folder.
        RemoveDir = "remove-dir",
        /// Rename or exchange.
        Rename = "rename",
        /// Make a hard link.
        Link = "link",
        /// Make a symbolic link.
        Symlink = "symlink",
        /// Make a FIFO, a socket or a device node.
        MakeNode = "make-node",
        /// Change permission bits or an access-control list.
        ChangeMode = "change-mode",
        /// Change owner or group.
        ChangeOwner = "change-owner",
        /// Change access or modification time.
        ChangeTimes = "change-times",
        /// Set or remove an extended attribute.
        ChangeXattr = "change-xattr",
        /// Change inode flags.
        ChangeFlags = "change-flags",
        /// Ask whether a write would be allowed, and be told no.
        CheckAccess = "check-access",
        /// Connect or send to a Unix socket.
        ConnectUnix = "connect-unix",
        /// Connect or send to a network address.
        Connect = "connect",
        /// Bind a network address.
        Bind = "bind",
        /// Create a socket of a family, type or protocol that the policy excludes.
        CreateSocket = "create-socket",
        /// Create or enter a namespace.
        Namespace = "namespace",
        /// Change the mount table.
        Mount = "mount",
        /// Signal, limit or reschedule a process outside.
        ControlProcess = "control-process",
        /// System V IPC, POSIX queues, keyrings.
        Ipc = "ipc",
        /// Type into a terminal on behalf of its user (`TIOCSTI`, `TIOCLINUX`).
        TerminalInput = "terminal-input",
        /// A kernel interface that is closed to confined commands (io_uring, bpf, userfaultfd, …).
        KernelInterface = "kernel-interface",
    }
}

named_enum! {
    /// The errors that a refused call returns. One per operation, the same in every tier (docs/facts.md has the reasons).
    Errno {
        /// Permission denied.
        Eacces = "EACCES",
        /// Operation not permitted.
        Eperm = "EPERM",
        /// Cross-device link.
        Exdev = "EXDEV",
        /// Function not implemented.
        Enosys = "ENOSYS",
        /// Network is unreachable.
        Enetunreach = "ENETUNREACH",
    }
}

impl Errno {
    /// The number on Linux (the same on x86-64 and aarch64).
    #[must_use]
    pub const fn number(self) -> i32 {
        match self {
            Self::Eperm => 1,
            Self::Eacces => 13,
            Self::Exdev => 18,
            Self::Enosys => 38,
            Self::Enetunreach => 101,
        }
    }
}

impl Operation {
    /// The error that a refusal of this operation returns, in every tier.
    ///
    /// Programs cope best with the error that the same refusal would have on an ordinary file of somebody else: `EACCES` for names
    /// and contents; `EPERM` for metadata (coreutils ignore exactly that when they preserve an owner); a hard link from outside looks
    /// like one across file systems, so that tools copy instead.
    #[must_use]
    pub const fn errno(self) -> Errno {
        match self {
            Self::Link => Errno::Exdev,
            Self::ChangeMode
            | Self::ChangeOwner
            | Self::ChangeTimes
            | Self::ChangeXattr
            | Self::ChangeFlags
            | Self::Namespace
            | Self::Mount
            | Self::ControlProcess
            | Self::TerminalInput => Errno::Eperm,
            Self::KernelInterface | Self::Ipc => Errno::Enosys,
            Self::Connect => Errno::Enetunreach,
            _ => Errno::Eacces,
        }
    }

    /// Whether this is about the network or sockets rather than files.
    #[must_use]
    pub const fn is_network(self) -> bool {
        matches!(
            self,
            Self::ConnectUnix | Self::Connect | Self::Bind | Self::CreateSocket
        )
    }
}

named_enum! {
    /// Which rule of the policy said no.
    Rule {
        /// The mode is `read-only`.
        ReadOnlyMode = "read-only-mode",
        /// The object is not below a writable root.
        OutsideWritableRoots = "outside-writable-roots",
        /// The object is a protected path inside a writable root.
        ProtectedPath = "protected-path",
        /// The object is below a `denyRead` path.
        DenyRead = "deny-read",
        /// The network axis is `none`.
        NetworkNone = "network-none",
        /// The network axis is `loopback`.
        NetworkLoopback = "network-loopback",
        /// The Unix socket is not in `allowUnixSocket`.
        UnixSocket = "unix-socket",
        /// Closed to confined commands whatever the policy.
        Confined = "confined",
    }
}

/// One refused operation, or several equal ones. Exists if and only if the sandbox itself said no.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DenialFact {
    /// What was tried.
    pub operation: Operation,
    /// The system call, by its kernel name (`openat`).
    pub syscall: String,
    /// The absolute, canonical path of the object as the command's file system sees it. Absent when there is no path or it could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<ByteString>,
    /// The path as the program gave it, when it differs from `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<ByteString>,
    /// The second path of a rename or link (the new name).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second_path: Option<ByteString>,
    /// What was refused when it is not a path: `AF_INET SOCK_STREAM`, `127.0.0.1:80`, `CLONE_NEWUSER`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The error that the call returned.
    pub errno: Errno,
    /// The rule that said no.
    pub rule: Rule,
    /// Process id as the daemon sees it.
    pub pid: u32,
    /// Parent process ids, nearest first, up to the command's shell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parents: Vec<u32>,
    /// The program, absolute; absent when it could not be read any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<ByteString>,
    /// How often exactly this was refused.
    pub count: u64,
    /// Milliseconds from the start of the command to the first refusal.
    #[serde(default)]
    pub first_ms: u64,
    /// Milliseconds from the start of the command to the last refusal.
    #[serde(default)]
    pub last_ms: u64,
    /// The narrowest change of policy that would allow it, in words of the policy (`mode workspace-write`, `writable /x`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_by: Option<String>,
}

impl DenialFact {
    /// Whether `other` is the same refusal again, so that only the count grows.
    #[must_use]
    pub fn repeats(&self, other: &Self) -> bool {
        self.operation == other.operation
            && self.pid == other.pid
            && self.syscall == other.syscall
            && self.path == other.path
            && self.second_path == other.second_path
            && self.detail == other.detail
            && self.rule == other.rule
    }

    /// One line for a person: `write-file /home/u/x: EACCES (outside-writable-roots) in /usr/bin/touch`.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut line = self.operation.to_string();
        for part in [self.path.as_ref(), self.second_path.as_ref()].into_iter().flatten() {
            line.push(' ');
            line.push_str(&printable(part));
        }
        if let Some(detail) = &self.detail {
            line.push(' ');
            line.push_str(detail);
        }
        line.push_str(&format!(": {} ({})", self.errno, self.rule));
        if let Some(executable) = &self.executable {
            line.push_str(" in ");
            line.push_str(&printable(executable));
        }
        if self.count > 1 {
            line.push_str(&format!(", {} times", self.count));
        }
        line
    }
}

/// A path on one line: control characters would let a file name write on a terminal.
fn printable(path: &ByteString) -> String {
    path.display()
        .chars()
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect::<Vec<_>>()
            } else {
                vec![c]
            }
        })
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_one_line_whatever_the_file_name() {
        let fact = DenialFact {
            operation: Operation::WriteFile,
            syscall: "openat".into(),
            path: Some("/x\n\u{1b}[31m".into()),
            given: None,
            second_path: None,
            detail: None,
            errno: Errno::Eacces,
            rule: Rule::ReadOnlyMode,
            pid: 3,
            parents: vec![],
            executable: Some("/usr/bin/touch".into()),
            count: 2,
            first_ms: 0,
            last_ms: 0,
            allowed_by: None,
        };
        assert_eq!(
            fact.summary(),
            "write-file /x\\n\\u{1b}[31m: EACCES (read-only-mode) in /usr/bin/touch, 2 times"
        );
        let json = serde_json::to_value(&fact).unwrap();
        assert_eq!(json["errno"], "EACCES");
        assert!(json.get("secondPath").is_none());
    }
}
