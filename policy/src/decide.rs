//! May this operation touch this object? Pure: paths in, verdict out.
//!
//! Every path is absolute and canonical in the command's own view of the file system (no `.`, `..`, symlinks or double slashes). The caller judges
//! each path of an operation by itself: a rename or link is allowed when both of its names are.
use crate::bytes::ByteString;
use crate::denial::{Operation, Rule};
use crate::git::{self, EveryRepository, RepositoryView};
use crate::mode::{Network, SandboxMode};
use crate::plan::Confinement;

pub use crate::remedy::allowed_by;

/// A judgement. There is no default: nothing is allowed by omission.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The policy permits it.
    Allow,
    /// The policy forbids it, by this rule.
    Refuse(Rule),
}

/// Whether `path` is `root` or lies below it, component-wise (`/a` contains `/a/b`, not `/ab`; `/` contains everything).
#[must_use]
pub fn is_within(root: &[u8], path: &[u8]) -> bool {
    root == b"/"
        || path
            .strip_prefix(root)
            .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// Whether `operation` may create, change or remove the object named `path`, as if every repository had been there before the command.
pub fn write(confinement: &Confinement, operation: Operation, path: &[u8]) -> Verdict {
    write_with(confinement, operation, path, &EveryRepository)
}

/// Like [`write`], with a caller that knows which repositories predate the command (so that `git init` works).
pub fn write_with(
    confinement: &Confinement,
    operation: Operation,
    path: &[u8],
    repositories: &dyn RepositoryView,
) -> Verdict {
    match operation {
        Operation::ReadFile => return read(confinement, path),
        Operation::ConnectUnix => return unix_connect(confinement, path),
        _ if !names_a_file(operation) => return Verdict::Refuse(Rule::Confined),
        _ => {}
    }
    if opens_for_writing(operation) && confinement.devices.iter().any(|device| device.as_bytes() == path) {
        return Verdict::Allow;
    }
    if confinement.mode == SandboxMode::ReadOnly {
        return Verdict::Refuse(Rule::ReadOnlyMode);
    }
    if !is_inside_writable_roots(confinement, operation, path) {
        return Verdict::Refuse(Rule::OutsideWritableRoots);
    }
    if is_protected(confinement, operation, path) || is_protected_git(confinement, operation, path, repositories) {
        return Verdict::Refuse(Rule::ProtectedPath);
    }
    Verdict::Allow
}

/// Whether `path` may be read.
pub fn read(confinement: &Confinement, path: &[u8]) -> Verdict {
    if is_within_any(&confinement.deny_read, path) {
        Verdict::Refuse(Rule::DenyRead)
    } else {
        Verdict::Allow
    }
}

/// Whether a Unix socket at `path` may be connected or sent to.
///
/// A socket that a command may have made itself (below a writable root) is its own business; one of a program of the host is a way out of the
/// sandbox. `/tmp` is shared with the host by default, so the well-known names of [`is_host_service`] are refused even there.
pub fn unix_connect(confinement: &Confinement, path: &[u8]) -> Verdict {
    let listed = is_within_any(&confinement.allow_unix_socket, path);
    let own = confinement
        .writable
        .iter()
        .any(|root| is_within(root.as_bytes(), path) && !is_host_service(root.as_bytes(), path))
        && !is_within_any(&confinement.protect, path);
    if listed || own {
        Verdict::Allow
    } else {
        Verdict::Refuse(Rule::UnixSocket)
    }
}

const AF_UNIX: i32 = 1;
const AF_INET: i32 = 2;
const AF_INET6: i32 = 10;
const AF_NETLINK: i32 = 16;
const SOCK_STREAM: i32 = 1;
const SOCK_DGRAM: i32 = 2;
const SOCK_TYPE_MASK: i32 = 0xf;
const NETLINK_ROUTE: i32 = 0;
const IPPROTO_TCP: i32 = 6;
const IPPROTO_UDP: i32 = 17;

/// Whether a socket of this family, type and protocol may be created.
///
/// Unix sockets are always possible (pairs, own servers; reaching one of the host is [`unix_connect`]'s question), and so is the kernel's list of
/// interfaces. `loopback` excludes whatever could go around an address check: MPTCP, SCTP, raw and packet sockets, other families.
pub fn socket(confinement: &Confinement, family: i32, kind: i32, protocol: i32) -> Verdict {
    match (family, confinement.network) {
        (AF_UNIX, _) | (_, Network::Full) => Verdict::Allow,
        (AF_NETLINK, _) if protocol == NETLINK_ROUTE => Verdict::Allow,
        (AF_INET | AF_INET6, Network::Loopback)
            if matches!(kind & SOCK_TYPE_MASK, SOCK_STREAM | SOCK_DGRAM)
                && matches!(protocol, 0 | IPPROTO_TCP | IPPROTO_UDP) =>
        {
            Verdict::Allow
        }
        (_, Network::Loopback) => Verdict::Refuse(Rule::NetworkLoopback),
        (_, Network::None) => Verdict::Refuse(Rule::NetworkNone),
    }
}

/// Operations that create, change or remove something with a path.
fn names_a_file(operation: Operation) -> bool {
    use Operation as O;
    matches!(
        operation,
        O::WriteFile
            | O::CreateFile
            | O::Truncate
            | O::MakeDir
            | O::RemoveFile
            | O::RemoveDir
            | O::Rename
            | O::Link
            | O::Symlink
            | O::MakeNode
            | O::ChangeMode
            | O::ChangeOwner
            | O::ChangeTimes
            | O::ChangeXattr
            | O::ChangeFlags
            | O::CheckAccess
    )
}

/// What `echo > /dev/null` does: `O_CREAT` and `O_TRUNC` mean nothing on an existing device.
fn opens_for_writing(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::WriteFile | Operation::CreateFile | Operation::Truncate | Operation::CheckAccess
    )
}

/// Operations that put another object, or none, in the place of a name; they act on the folder that holds the name.
fn replaces_name(operation: Operation) -> bool {
    use Operation as O;
    matches!(
        operation,
        O::RemoveFile | O::RemoveDir | O::Rename | O::Link | O::Symlink | O::MakeNode
    )
}

fn is_within_any(roots: &[ByteString], path: &[u8]) -> bool {
    roots.iter().any(|root| is_within(root.as_bytes(), path))
}

/// The folder that holds a name; `/` holds itself.
pub(crate) fn parent(path: &[u8]) -> &[u8] {
    match path.iter().rposition(|byte| *byte == b'/') {
        None | Some(0) => b"/",
        Some(slash) => &path[..slash],
    }
}

/// A root itself stays where it is unless the folder that holds it is writable too: below it is everything, itself is not.
fn is_inside_writable_roots(confinement: &Confinement, operation: Operation, path: &[u8]) -> bool {
    let object = if replaces_name(operation) && path != b"/" {
        parent(path)
    } else {
        path
    };
    is_within_any(&confinement.writable, object)
}

/// A protected path, or a folder above one that would take it along.
fn is_protected(confinement: &Confinement, operation: Operation, path: &[u8]) -> bool {
    confinement.protect.iter().any(|protected| {
        is_within(protected.as_bytes(), path) || (replaces_name(operation) && is_within(path, protected.as_bytes()))
    })
}

fn is_protected_git(
    confinement: &Confinement,
    operation: Operation,
    path: &[u8],
    repositories: &dyn RepositoryView,
) -> bool {
    confinement.protect_git
        && git::candidates(path)
            .iter()
            .any(|candidate| git::is_protected_from(candidate.part, operation) && repositories.predates(candidate))
}

/// Folders (with `/`) and sockets directly below `/tmp` that belong to sessions and agents of the host. A command's own temporary folder is one
/// level deeper, so the same programs started by a command are not meant.
const HOST_SOCKETS_IN_TMP: [&[u8]; 19] = [
    b".X11-unix/",
    b".ICE-unix/",
    b".XIM-unix/",
    b".font-unix/",
    b".s.PGSQL.",
    b".com.google.Chrome.",
    b".org.chromium.Chromium.",
    b"dbus-",
    b"dsh-execd-",
    b"emacs",
    b"gpg-",
    b"keyring-",
    b"kitty-",
    b"mysql",
    b"pulse-",
    b"screens/",
    b"ssh-",
    b"systemd-private-",
    b"tmux-",
];

/// Sockets whose last name alone says that they give control of the host, wherever they are.
const HOST_SOCKET_NAMES: [&[u8]; 6] = [
    b"docker.sock",
    b"podman.sock",
    b"containerd.sock",
    b"crio.sock",
    b"system_bus_socket",
    b"dsh-execd.sock",
];

/// Whether `path`, below the writable `root`, is by its name a socket of the host rather than of a command.
fn is_host_service(root: &[u8], path: &[u8]) -> bool {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // A root below `/tmp` (a workspace, the command's own folder) was chosen, whatever it is called.
    let in_tmp = if is_within(root, b"/tmp") {
        path.strip_prefix(b"/tmp/").unwrap_or_default()
    } else {
        b""
    };
    // `/run` is the host's; a root that lies in it was given on purpose, one that merely contains it (`/`) was not.
    let in_run = is_within(b"/run", path) && !is_within(b"/run", root);
    let agent = parent(path).ends_with(b"/.gnupg") && name.starts_with(b"S.");
    let editor = in_tmp.starts_with(b"vscode-") && name.ends_with(b".sock");
    in_run
        || agent
        || editor
        || HOST_SOCKET_NAMES.contains(&name)
        || HOST_SOCKETS_IN_TMP.iter().any(|known| in_tmp.starts_with(known))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::git::Candidate;
    use crate::mode::Tier;
    use Operation as O;
    use Verdict::{Allow, Refuse};

    fn workspace() -> Confinement {
        Confinement {
            mode: SandboxMode::WorkspaceWrite,
            tier: Tier::Landlock,
            writable: vec!["/w".into(), "/tmp".into(), "/etc/one.conf".into()],
            devices: vec!["/dev/null".into()],
            protect: vec!["/w/keep/this".into(), "/tmp/dsh-state".into()],
            protect_git: true,
            deny_read: vec!["/home/u/.ssh".into()],
            allow_unix_socket: vec!["/run/allowed.sock".into()],
            network: Network::Full,
            require: vec![],
            private_tmp_root: None,
        }
    }

    fn read_only() -> Confinement {
        Confinement {
            mode: SandboxMode::ReadOnly,
            writable: vec![],
            protect_git: false,
            ..workspace()
        }
    }

    fn assert_all(confinement: &Confinement, expected: Verdict, operations: &[Operation], path: &str) {
        for operation in operations {
            assert_eq!(
                write(confinement, *operation, path.as_bytes()),
                expected,
                "{operation} {path}"
            );
        }
    }

    const CONTENT: [O; 4] = [O::WriteFile, O::CreateFile, O::Truncate, O::CheckAccess];
    const NAMES: [O; 7] = [
        O::MakeDir,
        O::RemoveFile,
        O::RemoveDir,
        O::Rename,
        O::Link,
        O::Symlink,
        O::MakeNode,
    ];
    const METADATA: [O; 5] = [
        O::ChangeMode,
        O::ChangeOwner,
        O::ChangeTimes,
        O::ChangeXattr,
        O::ChangeFlags,
    ];

    #[test]
    fn containment_is_by_component() {
        assert!(is_within(b"/a", b"/a") && is_within(b"/a", b"/a/b") && is_within(b"/", b"/x"));
        assert!(!is_within(b"/a", b"/ab") && !is_within(b"/a/b", b"/a"));
    }

    #[test]
    fn read_only_refuses_every_change_and_devices_only_open() {
        for operations in [&CONTENT[..], &NAMES, &METADATA] {
            assert_all(&read_only(), Refuse(Rule::ReadOnlyMode), operations, "/w/a");
        }
        assert_all(&read_only(), Allow, &CONTENT, "/dev/null");
        assert_all(&read_only(), Refuse(Rule::ReadOnlyMode), &NAMES, "/dev/null");
        assert_all(&read_only(), Refuse(Rule::ReadOnlyMode), &METADATA, "/dev/null");
        assert_all(&read_only(), Refuse(Rule::ReadOnlyMode), &CONTENT, "/dev/null/x");
        assert_all(&workspace(), Refuse(Rule::OutsideWritableRoots), &METADATA, "/dev/null");
    }

    #[test]
    fn workspace_write_is_the_roots_and_nothing_beside_them() {
        for operations in [&CONTENT[..], &NAMES, &METADATA] {
            assert_all(&workspace(), Allow, operations, "/w/a/b");
            assert_all(&workspace(), Refuse(Rule::OutsideWritableRoots), operations, "/ww/a");
            assert_all(&workspace(), Refuse(Rule::OutsideWritableRoots), operations, "/");
        }
    }

    #[test]
    fn a_root_itself_stays_but_may_be_written_to() {
        for operation in [O::RemoveFile, O::RemoveDir, O::Rename, O::Link, O::Symlink, O::MakeNode] {
            assert_eq!(
                write(&workspace(), operation, b"/w"),
                Refuse(Rule::OutsideWritableRoots),
                "{operation}"
            );
            assert_eq!(
                write(&workspace(), operation, b"/etc/one.conf"),
                Refuse(Rule::OutsideWritableRoots)
            );
        }
        assert_all(&workspace(), Allow, &CONTENT, "/etc/one.conf");
        assert_all(&workspace(), Allow, &METADATA, "/w");
        let nested = Confinement {
            writable: vec!["/w".into(), "/w/sub".into()],
            ..workspace()
        };
        assert_all(&nested, Allow, &NAMES, "/w/sub");
        let everything = Confinement {
            writable: vec!["/".into()],
            protect: vec![],
            ..workspace()
        };
        assert_all(&everything, Allow, &NAMES, "/etc/x");
    }

    #[test]
    fn a_protected_path_wins_over_its_root_and_is_not_taken_along_by_a_folder_above() {
        for operations in [&CONTENT[..], &NAMES, &METADATA] {
            assert_all(&workspace(), Refuse(Rule::ProtectedPath), operations, "/w/keep/this");
            assert_all(
                &workspace(),
                Refuse(Rule::ProtectedPath),
                operations,
                "/w/keep/this/below",
            );
            assert_all(&workspace(), Allow, operations, "/w/keep/thisnot");
        }
        let taking = [O::RemoveFile, O::RemoveDir, O::Rename, O::Symlink];
        assert_all(&workspace(), Refuse(Rule::ProtectedPath), &taking, "/w/keep");
        assert_all(&workspace(), Allow, &METADATA, "/w/keep");
        assert_all(&workspace(), Allow, &[O::MakeDir], "/w/keep");
    }

    #[test]
    fn what_git_trusts_is_protected_and_what_it_writes_every_day_is_not() {
        for path in [
            "/w/.git/hooks/pre-commit",
            "/w/sub/.git/config",
            "/w/.git/info/attributes",
        ] {
            for operations in [&CONTENT[..], &NAMES, &METADATA] {
                assert_all(&workspace(), Refuse(Rule::ProtectedPath), operations, path);
            }
        }
        assert_all(
            &workspace(),
            Refuse(Rule::ProtectedPath),
            &[O::Rename, O::RemoveDir, O::CreateFile],
            "/w/.git",
        );
        assert_all(&workspace(), Allow, &[O::MakeDir, O::CheckAccess], "/w/.git");
        for path in [
            "/w/.git/config.lock",
            "/w/.git/index",
            "/w/.git/refs/heads/config",
            "/w/.git/HEAD",
        ] {
            assert_all(
                &workspace(),
                Allow,
                &[O::CreateFile, O::Rename, O::RemoveFile, O::Link],
                path,
            );
        }
        assert_all(
            &workspace(),
            Refuse(Rule::ProtectedPath),
            &[O::Rename, O::Symlink],
            "/w/.git/info",
        );
        assert_all(&workspace(), Allow, &[O::MakeDir, O::RemoveDir], "/w/.git/worktrees/w2");
        let unprotected = Confinement {
            protect_git: false,
            ..workspace()
        };
        assert_all(&unprotected, Allow, &CONTENT, "/w/.git/hooks/pre-commit");
    }

    struct OnlyBare;
    impl RepositoryView for OnlyBare {
        fn predates(&self, candidate: &Candidate<'_>) -> bool {
            candidate.git_dir == b"/w/bare"
        }
    }

    #[test]
    fn a_view_frees_new_repositories_and_finds_old_ones_without_a_telling_name() {
        for path in [&b"/w/new/.git"[..], b"/w/new/.git/hooks/x", b"/w/new/.git/config"] {
            assert_eq!(write_with(&workspace(), O::CreateFile, path, &OnlyBare), Allow);
        }
        assert_eq!(
            write_with(&workspace(), O::Rename, b"/w/bare/config", &OnlyBare),
            Refuse(Rule::ProtectedPath)
        );
    }

    #[test]
    fn operations_that_are_not_on_files_are_never_allowed_by_a_path() {
        for operation in [
            O::Connect,
            O::Bind,
            O::CreateSocket,
            O::Namespace,
            O::Mount,
            O::Ipc,
            O::ControlProcess,
        ] {
            assert_eq!(
                write(&workspace(), operation, b"/w/a"),
                Refuse(Rule::Confined),
                "{operation}"
            );
        }
        assert_eq!(
            write(&workspace(), O::ReadFile, b"/home/u/.ssh/id"),
            Refuse(Rule::DenyRead)
        );
        assert_eq!(read(&workspace(), b"/home/u/.sshx"), Allow);
    }

    #[test]
    fn a_unix_socket_is_the_command_s_own_or_listed() {
        for path in [
            "/w/s",
            "/tmp/x.sock",
            "/tmp/dsh-0-12ab/ssh-XX/agent.1",
            "/run/allowed.sock",
        ] {
            assert_eq!(unix_connect(&workspace(), path.as_bytes()), Allow, "{path}");
        }
        for path in [
            "/run/docker.sock",
            "/tmp/.X11-unix/X0",
            "/tmp/ssh-XXab/agent.12",
            "/tmp/tmux-0/default",
            "/tmp/dsh-execd-0/socket",
            "/tmp/dsh-state/s",
            "/tmp/vscode-ipc-1.sock",
            "/w/.gnupg/S.gpg-agent",
            "/w/docker.sock",
        ] {
            assert_eq!(
                unix_connect(&workspace(), path.as_bytes()),
                Refuse(Rule::UnixSocket),
                "{path}"
            );
        }
        assert_eq!(unix_connect(&read_only(), b"/w/s"), Refuse(Rule::UnixSocket));
        let everything = Confinement {
            writable: vec!["/".into()],
            ..workspace()
        };
        assert_eq!(unix_connect(&everything, b"/run/user/0/bus"), Refuse(Rule::UnixSocket));
        let named_like_one = Confinement {
            writable: vec!["/tmp".into(), "/tmp/ssh-work".into()],
            ..workspace()
        };
        assert_eq!(unix_connect(&named_like_one, b"/tmp/ssh-work/s"), Allow);
        let on_purpose = Confinement {
            writable: vec!["/run/mine".into()],
            ..workspace()
        };
        assert_eq!(unix_connect(&on_purpose, b"/run/mine/s"), Allow);
    }

    #[test]
    fn sockets_follow_the_network_axis() {
        let with = |network| Confinement { network, ..workspace() };
        let cases: [(i32, i32, i32, [Verdict; 3]); 9] = [
            (AF_UNIX, SOCK_STREAM, 0, [Allow; 3]),
            (AF_NETLINK, 3, 0, [Allow; 3]),
            (
                AF_NETLINK,
                3,
                9,
                [Refuse(Rule::NetworkNone), Refuse(Rule::NetworkLoopback), Allow],
            ),
            (AF_INET, SOCK_STREAM, 0, [Refuse(Rule::NetworkNone), Allow, Allow]),
            (
                AF_INET6,
                SOCK_DGRAM | 0o2000000,
                17,
                [Refuse(Rule::NetworkNone), Allow, Allow],
            ),
            (
                AF_INET,
                SOCK_STREAM,
                262,
                [Refuse(Rule::NetworkNone), Refuse(Rule::NetworkLoopback), Allow],
            ),
            (
                AF_INET,
                SOCK_STREAM,
                132,
                [Refuse(Rule::NetworkNone), Refuse(Rule::NetworkLoopback), Allow],
            ),
            (
                AF_INET,
                3,
                1,
                [Refuse(Rule::NetworkNone), Refuse(Rule::NetworkLoopback), Allow],
            ),
            (
                40,
                SOCK_STREAM,
                0,
                [Refuse(Rule::NetworkNone), Refuse(Rule::NetworkLoopback), Allow],
            ),
        ];
        for (family, kind, protocol, expected) in cases {
            for (network, expected) in Network::ALL.iter().zip(expected) {
                assert_eq!(
                    socket(&with(*network), family, kind, protocol),
                    expected,
                    "{family} {kind} {protocol} {network}"
                );
            }
        }
    }
}
