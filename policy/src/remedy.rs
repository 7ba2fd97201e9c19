//! The narrowest change of policy that would allow a refused operation, in words that a person approves and a program can parse.
//!
//! ```text
//! remedy  = change *( " and " change )
//! change  = "mode workspace-write" | "mode danger-full-access" | "writable " path | "socket " path | "network full"
//! path    = as it is, or "\"" escaped "\"" when it has spaces, quotes, control characters or bytes that are not UTF-8
//! ```
//!
//! `writable` names the folder to open; `socket` is an entry of `allowUnixSocket`. Where nothing narrower would do (protected paths, `denyRead`, kernel
//! interfaces, the host's own `/dev`, `/proc`, `/sys`) the answer is `mode danger-full-access`.
use crate::decide::{is_within, parent};
use crate::denial::{Operation, Rule};
use crate::mode::SandboxMode;
use crate::plan::Confinement;

/// The narrowest change of policy that would allow a refused operation, in words for an approval prompt.
#[must_use]
pub fn allowed_by(confinement: &Confinement, operation: Operation, rule: Rule, path: Option<&[u8]>) -> Option<String> {
    Some(match rule {
        Rule::ReadOnlyMode | Rule::OutsideWritableRoots => file_remedy(confinement, operation, path),
        Rule::NetworkNone | Rule::NetworkLoopback => "network full".to_owned(),
        Rule::UnixSocket => path.map_or_else(full_access, |path| format!("socket {}", quoted(path))),
        Rule::ProtectedPath | Rule::DenyRead | Rule::Confined => full_access(),
    })
}

fn full_access() -> String {
    format!("mode {}", SandboxMode::DangerFullAccess)
}

fn file_remedy(confinement: &Confinement, operation: Operation, path: Option<&[u8]>) -> String {
    let Some(folder) = path.and_then(|path| folder_to_open(operation, path)) else {
        return full_access();
    };
    let open_it = format!("writable {}", quoted(folder));
    if confinement.mode != SandboxMode::ReadOnly {
        return open_it;
    }
    let mode = format!("mode {}", SandboxMode::WorkspaceWrite);
    // Every `workspace-write` opens these two; the workspace of a wider request is not known here.
    if [&b"/tmp"[..], b"/dev/shm"].iter().any(|root| is_within(root, folder)) {
        return mode;
    }
    format!("{mode} and {open_it}")
}

/// The folder that would have to be a writable root; none where opening one would be as wide as no confinement.
fn folder_to_open(operation: Operation, path: &[u8]) -> Option<&[u8]> {
    let folder = if operation == Operation::CheckAccess {
        path
    } else {
        parent(path)
    };
    let of_the_kernel = [&b"/dev"[..], b"/proc", b"/sys"]
        .iter()
        .any(|root| is_within(root, folder));
    let is_shm = is_within(b"/dev/shm", folder);
    (folder != b"/" && (!of_the_kernel || is_shm)).then_some(folder)
}

/// A path that cannot be mistaken for more than one word, nor write on a terminal.
fn quoted(path: &[u8]) -> String {
    match std::str::from_utf8(path) {
        Ok(text) if !text.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '"' | '\\')) => {
            text.to_owned()
        }
        Ok(text) => format!("{text:?}"),
        Err(_) => format!("\"{}\"", path.escape_ascii()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mode::{Network, Tier};

    fn remedy(mode: SandboxMode, operation: Operation, rule: Rule, path: Option<&[u8]>) -> Option<String> {
        let confinement = Confinement {
            mode,
            tier: Tier::Landlock,
            writable: vec![],
            devices: vec![],
            protect: vec![],
            protect_git: false,
            deny_read: vec![],
            allow_unix_socket: vec![],
            network: Network::None,
            require: vec![],
            private_tmp_root: None,
        };
        allowed_by(&confinement, operation, rule, path)
    }

    #[test]
    fn every_remedy_is_the_narrowest_that_does() {
        use Operation as O;
        use SandboxMode::{ReadOnly, WorkspaceWrite};
        type Case = (SandboxMode, Operation, Rule, Option<&'static [u8]>, &'static str);
        let cases: [Case; 14] = [
            (
                WorkspaceWrite,
                O::WriteFile,
                Rule::OutsideWritableRoots,
                Some(b"/home/u/x"),
                "writable /home/u",
            ),
            (
                ReadOnly,
                O::CreateFile,
                Rule::ReadOnlyMode,
                Some(b"/w/a"),
                "mode workspace-write and writable /w",
            ),
            (
                ReadOnly,
                O::CreateFile,
                Rule::ReadOnlyMode,
                Some(b"/tmp/a"),
                "mode workspace-write",
            ),
            (
                ReadOnly,
                O::CreateFile,
                Rule::ReadOnlyMode,
                Some(b"/dev/shm/a"),
                "mode workspace-write",
            ),
            (
                ReadOnly,
                O::MakeDir,
                Rule::ReadOnlyMode,
                Some(b"/new"),
                "mode danger-full-access",
            ),
            (
                WorkspaceWrite,
                O::WriteFile,
                Rule::OutsideWritableRoots,
                Some(b"/dev/sda"),
                "mode danger-full-access",
            ),
            (
                WorkspaceWrite,
                O::WriteFile,
                Rule::OutsideWritableRoots,
                None,
                "mode danger-full-access",
            ),
            (
                WorkspaceWrite,
                O::CheckAccess,
                Rule::OutsideWritableRoots,
                Some(b"/etc"),
                "writable /etc",
            ),
            (
                WorkspaceWrite,
                O::Rename,
                Rule::ProtectedPath,
                Some(b"/w/.git/config"),
                "mode danger-full-access",
            ),
            (WorkspaceWrite, O::CreateSocket, Rule::NetworkNone, None, "network full"),
            (
                WorkspaceWrite,
                O::ConnectUnix,
                Rule::UnixSocket,
                Some(b"/run/d.sock"),
                "socket /run/d.sock",
            ),
            (
                WorkspaceWrite,
                O::ConnectUnix,
                Rule::UnixSocket,
                None,
                "mode danger-full-access",
            ),
            (
                WorkspaceWrite,
                O::WriteFile,
                Rule::OutsideWritableRoots,
                Some(b"/a and b\n/c"),
                "writable \"/a and b\\n\"",
            ),
            (
                WorkspaceWrite,
                O::WriteFile,
                Rule::OutsideWritableRoots,
                Some(b"/\xff/c"),
                "writable \"/\\xff\"",
            ),
        ];
        for (mode, operation, rule, path, expected) in cases {
            assert_eq!(remedy(mode, operation, rule, path).as_deref(), Some(expected));
        }
    }
}
