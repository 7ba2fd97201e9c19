//! What a request becomes: defaults, caps, bounds, path identity, and every error by its exact text.
#![allow(clippy::unwrap_used)]

mod tree;

use dsh_policy::mode::{Guarantee, Lifetime, Network, TmpKind};
use dsh_policy::resolve::{Surroundings, resolve};
use dsh_policy::{
    BashExecRequest, BashExecSpec, ByteString, Deployment, ErrorCode, ExecError, PolicyRequest, SandboxMode,
};
use tree::Tree;

fn request(policy: PolicyRequest) -> BashExecRequest {
    BashExecRequest {
        command: "true".into(),
        sandbox_policy: Some(policy),
        ..BashExecRequest::default()
    }
}

fn in_workspace(tree: &Tree) -> PolicyRequest {
    PolicyRequest {
        workspace_root: Some(tree.path("work")),
        ..PolicyRequest::default()
    }
}

fn resolved(tree: &Tree, request: &BashExecRequest, deployment: &Deployment) -> Result<BashExecSpec, ExecError> {
    let surroundings = Surroundings {
        home: Some(&tree.home),
        daemon_workdir: &tree.root,
    };
    resolve(request, deployment, surroundings)
}

fn assert_error(tree: &Tree, request: &BashExecRequest, deployment: &Deployment, code: ErrorCode, message: &str) {
    let error = resolved(tree, request, deployment).unwrap_err();
    assert_eq!(
        (error.code, error.message),
        (code, message.replace("ROOT", &tree.root.to_string_lossy()))
    );
}

#[test]
fn the_defaults_are_the_contract_s() {
    let tree = Tree::new();
    let bare = BashExecRequest {
        command: "true".into(),
        ..BashExecRequest::default()
    };
    let spec = resolved(&tree, &bare, &Deployment::default()).unwrap();
    assert_eq!(spec.workdir, tree.path(""));
    assert_eq!(
        (spec.timeout_ms, spec.stdout_max_bytes, spec.umask),
        (120_000, 64_000, 0o022)
    );
    assert_eq!((spec.lifetime, spec.session), (Lifetime::Foreground, None));
    let policy = spec.sandbox_policy;
    assert_eq!(
        (policy.mode, policy.network, policy.tmp),
        (SandboxMode::ReadOnly, Network::Full, TmpKind::Shared)
    );
    assert_eq!((policy.requested_mode, policy.requested_network), (None, None));
    assert_eq!(policy.workspace_root, tree.path(""));
    assert!(!policy.protect_git, "nothing can be written in read-only");
}

#[test]
fn a_command_is_text_with_something_in_it() {
    let tree = Tree::new();
    let command = |bytes: &[u8]| BashExecRequest {
        command: bytes.into(),
        ..BashExecRequest::default()
    };
    for blank in [&b""[..], b" \t\n", "\u{2003}".as_bytes()] {
        assert_error(
            &tree,
            &command(blank),
            &Deployment::default(),
            ErrorCode::InvalidRequest,
            "invalid command: expected a non-empty string",
        );
    }
    assert_error(
        &tree,
        &command(b"echo\0x"),
        &Deployment::default(),
        ErrorCode::InvalidRequest,
        "invalid command: expected text without NUL bytes, found one at byte 4",
    );
    assert_error(
        &tree,
        &command(&[b'x'; 131_072]),
        &Deployment::default(),
        ErrorCode::LimitExceeded,
        "the command has 131072 bytes, the kernel accepts at most 131071 as one argument of bash; put it in a file, or send it by stdin to `bash -s`",
    );
    for fine in [&[b'x'; 131_071][..], b"-c", b"#!/bin/sh", b"\xff"] {
        assert_eq!(
            resolved(&tree, &command(fine), &Deployment::default())
                .unwrap()
                .command
                .as_bytes(),
            fine
        );
    }
}

#[test]
fn numbers_are_capped_and_zero_is_no_time_limit() {
    let tree = Tree::new();
    let mut asked = request(in_workspace(&tree));
    asked.timeout_ms = Some(0);
    assert_error(
        &tree,
        &asked,
        &Deployment::default(),
        ErrorCode::InvalidRequest,
        "invalid timeoutMs: expected a positive number, got 0",
    );
    (asked.timeout_ms, asked.stdout_max_bytes, asked.umask) = (Some(u64::MAX), Some(u64::MAX), Some(0o777_077));
    asked.background = true;
    let spec = resolved(&tree, &asked, &Deployment::default()).unwrap();
    assert_eq!(
        (spec.timeout_ms, spec.stdout_max_bytes, spec.umask),
        (600_000, 16 * 1024 * 1024, 0o077)
    );
    assert_eq!(spec.lifetime, Lifetime::Session);
}

#[test]
fn the_working_directory_comes_from_the_nearest_that_has_one() {
    let tree = Tree::new();
    let configured = Deployment {
        workdir: Some(tree.path("far")),
        ..Deployment::default()
    };
    let cases = [
        (Some(tree.path("far/deep")), true, "far/deep"),
        (Some("sub".into()), true, "work/sub"),
        (Some("sub".into()), false, "far/sub"),
        (None, true, "work"),
        (None, false, "far"),
        (Some("link/..".into()), true, "far"),
        (Some("with space\nand line".into()), true, "work/with space\nand line"),
        (Some("".into()), true, "work"),
    ];
    std::fs::create_dir(tree.root.join("far/sub")).unwrap();
    for (workdir, has_workspace, expected) in cases {
        let policy = if has_workspace {
            in_workspace(&tree)
        } else {
            PolicyRequest::default()
        };
        let asked = BashExecRequest {
            workdir: workdir.clone(),
            ..request(policy)
        };
        let spec = resolved(&tree, &asked, &configured).unwrap();
        assert_eq!(spec.workdir, tree.path(expected), "{workdir:?} {has_workspace}");
        let root = if has_workspace {
            tree.path("work")
        } else {
            spec.workdir.clone()
        };
        assert_eq!(
            spec.sandbox_policy.workspace_root, root,
            "without a workspace the working directory is it"
        );
    }
}

#[test]
fn a_workspace_is_one_folder_whatever_it_is_called() {
    let tree = Tree::new();
    for name in [&b"work/link"[..], b"work/l\xff", b"work/link/.", b"work//link/"] {
        let mut path = tree.path("").0;
        path.push(b'/');
        path.extend_from_slice(name);
        let asked = request(PolicyRequest {
            workspace_root: Some(path.into()),
            ..PolicyRequest::default()
        });
        let spec = resolved(&tree, &asked, &Deployment::default()).unwrap();
        assert_eq!(spec.workdir, spec.sandbox_policy.workspace_root);
        let expected = if name.ends_with(b"\xff") {
            tree.root.join("work/").into_os_string()
        } else {
            tree.root.join("far/deep").into()
        };
        assert!(
            spec.workdir
                .as_bytes()
                .starts_with(ByteString::from(expected).as_bytes()),
            "{:?}",
            spec.workdir
        );
    }
}

#[test]
fn an_unusable_working_directory_says_which_and_why() {
    let tree = Tree::new();
    for (workdir, shown, reason) in [
        ("none", "ROOT/work/none", "not found"),
        ("file", "ROOT/work/file", "not a directory"),
        ("/\0", "/\0", "the path has a NUL byte"),
    ] {
        let asked = BashExecRequest {
            workdir: Some(workdir.into()),
            ..request(in_workspace(&tree))
        };
        let message = format!("cannot use working directory {shown}: {reason}");
        assert_error(
            &tree,
            &asked,
            &Deployment::default(),
            ErrorCode::WorkdirUnusable,
            &message,
        );
    }
    let gone = request(PolicyRequest {
        workspace_root: Some(tree.path("gone")),
        ..PolicyRequest::default()
    });
    let message = "cannot use working directory ROOT/gone: not found";
    assert_error(
        &tree,
        &gone,
        &Deployment::default(),
        ErrorCode::WorkdirUnusable,
        message,
    );
}

/// Root may enter every folder, everybody else gets the kernel's answer.
#[test]
fn a_folder_that_cannot_be_entered_is_unusable_for_whom_it_cannot_be_entered() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let tree = Tree::new();
    let locked = tree.root.join("far/deep");
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o600)).unwrap();
    let asked = BashExecRequest {
        workdir: Some("link".into()),
        ..request(in_workspace(&tree))
    };
    if std::fs::metadata("/proc/self").unwrap().uid() == 0 {
        assert_eq!(
            resolved(&tree, &asked, &Deployment::default()).unwrap().workdir,
            tree.path("far/deep")
        );
    } else {
        let message = "cannot use working directory ROOT/work/link: permission denied";
        assert_error(
            &tree,
            &asked,
            &Deployment::default(),
            ErrorCode::WorkdirUnusable,
            message,
        );
    }
    std::fs::set_permissions(&locked, std::fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_path_in_the_policy_that_cannot_be_used_is_an_error_that_names_it() {
    let tree = Tree::new();
    let elsewhere = |policy| BashExecRequest {
        workdir: Some("/".into()),
        ..request(policy)
    };
    let cases = [
        (
            PolicyRequest {
                workspace_root: Some(tree.path("gone")),
                ..PolicyRequest::default()
            },
            "invalid workspaceRoot: cannot use ROOT/gone: not found",
        ),
        (
            PolicyRequest {
                workspace_root: Some("work".into()),
                ..PolicyRequest::default()
            },
            "invalid workspaceRoot: expected an absolute path, got work",
        ),
        (
            PolicyRequest {
                writable: vec![tree.path("work"), tree.path("gone")],
                ..PolicyRequest::default()
            },
            "invalid writable: cannot use ROOT/gone: not found",
        ),
        (
            PolicyRequest {
                deny_read: vec!["secret".into()],
                ..PolicyRequest::default()
            },
            "invalid denyRead: expected an absolute path, got secret",
        ),
        (
            PolicyRequest {
                protect: vec!["a\0".into()],
                ..PolicyRequest::default()
            },
            "invalid protect: a\\x00 has a NUL byte",
        ),
    ];
    for (policy, message) in cases {
        assert_error(
            &tree,
            &elsewhere(policy),
            &Deployment::default(),
            ErrorCode::InvalidRequest,
            message,
        );
    }
}

#[test]
fn home_is_known_in_lists_and_links_are_protected_with_their_targets() {
    let tree = Tree::new();
    let policy = PolicyRequest {
        protect: vec!["link".into(), "later/x".into(), "~/keep".into()],
        deny_read: vec!["~/.ssh".into(), "~".into(), tree.path("work/link/id")],
        ..in_workspace(&tree)
    };
    let found = resolved(&tree, &request(policy.clone()), &Deployment::default())
        .unwrap()
        .sandbox_policy;
    let expected = ["work/link", "far/deep", "work/later/x", "home/keep"].map(|name| tree.path(name));
    assert_eq!(found.protect, expected);
    assert_eq!(
        found.deny_read,
        ["home/.ssh", "home", "far/deep/id"].map(|name| tree.path(name))
    );
    let homeless = Surroundings {
        home: None,
        daemon_workdir: &tree.root,
    };
    let error = resolve(&request(policy), &Deployment::default(), homeless).unwrap_err();
    assert_eq!(
        error.message,
        "invalid protect: ~/keep cannot be resolved, the home folder is not known"
    );
}

#[test]
fn a_request_beyond_the_bounds_is_narrowed_and_told_so() {
    let tree = Tree::new();
    let narrow = Deployment {
        max_mode: SandboxMode::WorkspaceWrite,
        network: Network::Loopback,
        tmp: TmpKind::Private,
        protect: vec![".env".into()],
        deny_read: vec!["/etc/shadow".into()],
        require: vec![Guarantee::Facts],
        ..Deployment::default()
    };
    let wide = PolicyRequest {
        mode: Some(SandboxMode::DangerFullAccess),
        network: Some(Network::Full),
        tmp: Some(TmpKind::Shared),
        ..in_workspace(&tree)
    };
    let policy = resolved(&tree, &request(wide), &narrow).unwrap().sandbox_policy;
    assert_eq!(
        (policy.mode, policy.requested_mode),
        (SandboxMode::WorkspaceWrite, Some(SandboxMode::DangerFullAccess))
    );
    assert_eq!(
        (policy.network, policy.requested_network),
        (Network::Loopback, Some(Network::Full))
    );
    assert_eq!(policy.tmp, TmpKind::Private);
    assert_eq!(
        (policy.protect, policy.deny_read),
        (vec![tree.path("work/.env")], vec!["/etc/shadow".into()])
    );
    assert_eq!((policy.require, policy.protect_git), (vec![Guarantee::Facts], true));
    let narrower = PolicyRequest {
        network: Some(Network::None),
        ..in_workspace(&tree)
    };
    let policy = resolved(&tree, &request(narrower), &narrow).unwrap().sandbox_policy;
    assert_eq!(
        (policy.network, policy.requested_network, policy.requested_mode),
        (Network::None, None, None)
    );
}

#[test]
fn a_path_beyond_the_bounds_is_refused_in_the_mode_that_would_write_there() {
    let tree = Tree::new();
    let bound = Deployment {
        writable_bounds: Some(vec![tree.path("far")]),
        ..Deployment::default()
    };
    let writes = |policy| {
        request(PolicyRequest {
            mode: Some(SandboxMode::WorkspaceWrite),
            ..policy
        })
    };
    let outside = format!(
        "invalid workspaceRoot: ROOT/work is outside of what this deployment lets requests write to ({})",
        tree.path("far").display()
    );
    assert_error(
        &tree,
        &writes(in_workspace(&tree)),
        &bound,
        ErrorCode::InvalidRequest,
        &outside,
    );
    let inside = PolicyRequest {
        workspace_root: Some(tree.path("work/link")),
        ..PolicyRequest::default()
    };
    assert!(
        resolved(&tree, &writes(inside.clone()), &bound).is_ok(),
        "the link leads into the bound"
    );
    let extra = PolicyRequest {
        writable: vec![tree.path("work")],
        ..inside
    };
    assert_error(
        &tree,
        &writes(extra),
        &bound,
        ErrorCode::InvalidRequest,
        &outside.replace("workspaceRoot", "writable"),
    );
    assert!(
        resolved(&tree, &request(in_workspace(&tree)), &bound).is_ok(),
        "read-only writes nowhere"
    );
}

#[test]
fn a_confined_deployment_decides_which_host_sockets_can_be_reached() {
    let tree = Tree::new();
    let confined = Deployment {
        max_mode: SandboxMode::WorkspaceWrite,
        allow_unix_socket: vec!["/srv/sockets".into()],
        ..Deployment::default()
    };
    let asking = |path: &str| {
        request(PolicyRequest {
            allow_unix_socket: vec![path.into()],
            ..in_workspace(&tree)
        })
    };
    let found = resolved(&tree, &asking("/srv/sockets/a"), &confined)
        .unwrap()
        .sandbox_policy
        .allow_unix_socket;
    assert_eq!(found, ["/srv/sockets/a".into(), "/srv/sockets".into()]);
    assert_error(
        &tree,
        &asking("/srv/docker.sock"),
        &confined,
        ErrorCode::InvalidRequest,
        "invalid allowUnixSocket: /srv/docker.sock is not among the sockets that this deployment allows (/srv/sockets)",
    );
    assert!(resolved(&tree, &asking("/srv/docker.sock"), &Deployment::default()).is_ok());
}
