//! Every infrastructure failure: its code, its words, and that nothing ran.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs;
use std::os::unix::fs::PermissionsExt;

use dsh_policy::error::{ErrorCode, ExecError};
use dsh_policy::wire::{ClientMessage, Encoding, ServerMessage};
use dsh_policy::{BashExecRequest, PolicyRequest, SandboxMode};
use dsh_tests::wire::{Peer, request};
use dsh_tests::{World, users};

fn error_of(world: &World, request: BashExecRequest) -> ExecError {
    let mut peer = Peer::hello(&world.socket(), Encoding::Bincode);
    peer.send(&ClientMessage::Run {
        id: 1,
        request: Box::new(request),
        stream: false,
    });
    match peer.last_answer(1) {
        ServerMessage::Error { error, .. } => error,
        other => panic!("not an error: {other:?}"),
    }
}

fn with(change: impl FnOnce(&mut BashExecRequest)) -> BashExecRequest {
    let mut asked = request("touch ran");
    change(&mut asked);
    asked
}

fn one(name: &str, value: &str) -> Option<dsh_policy::request::EnvMap> {
    Some([(name.into(), value.into())].into())
}

#[test]
fn a_wrong_request_says_what_is_wrong() {
    let world = World::new(users()[0]);
    let rows: Vec<(BashExecRequest, ErrorCode, &str)> = vec![
        (
            request(""),
            ErrorCode::InvalidRequest,
            "invalid command: expected a non-empty string",
        ),
        (
            request(" \t\n"),
            ErrorCode::InvalidRequest,
            "invalid command: expected a non-empty string",
        ),
        (request("echo \0"), ErrorCode::InvalidRequest, "command"),
        (
            with(|r| r.timeout_ms = Some(0)),
            ErrorCode::InvalidRequest,
            "invalid timeoutMs: expected a positive number, got 0",
        ),
        (
            with(|r| r.workdir = Some("/nowhere/x".into())),
            ErrorCode::WorkdirUnusable,
            "cannot use working directory /nowhere/x: ",
        ),
        (
            with(|r| r.workdir = Some("/etc/hostname".into())),
            ErrorCode::WorkdirUnusable,
            "cannot use working directory /etc/hostname: ",
        ),
        (with(|r| r.env = one("DSH_X", "1")), ErrorCode::InvalidRequest, "DSH_X"),
        (with(|r| r.env = one("A=B", "1")), ErrorCode::InvalidRequest, "A=B"),
        (with(|r| r.env = one("", "1")), ErrorCode::InvalidRequest, ""),
        (with(|r| r.env = one("NUL", "a\0b")), ErrorCode::InvalidRequest, "NUL"),
        (
            with(|r| r.dsh_env = one("HOME", "1")),
            ErrorCode::InvalidRequest,
            "HOME",
        ),
        (
            with(|r| {
                r.sandbox_policy = Some(PolicyRequest {
                    writable: vec!["/nowhere/y".into()],
                    ..write_policy()
                })
            }),
            ErrorCode::InvalidRequest,
            "/nowhere/y",
        ),
        (
            with(|r| r.command = "x".repeat(3 << 20).into()),
            ErrorCode::LimitExceeded,
            "command",
        ),
    ];
    for (asked, code, words) in rows {
        let name = format!("{asked:?}");
        let error = error_of(&world, asked);
        assert_eq!(error.code, code, "{name}: {error}");
        assert!(error.message.contains(words), "{name}: {error}");
        assert!(!error.message.contains('\n'), "one line: {error:?}");
    }
    assert!(!world.workspace().join("ran").exists());
}

fn write_policy() -> PolicyRequest {
    PolicyRequest {
        mode: Some(SandboxMode::WorkspaceWrite),
        ..PolicyRequest::default()
    }
}

/// No tier may be used: nothing runs, the first sentence is the contract's, and full access is not affected.
#[test]
fn without_a_usable_tier_nothing_confined_runs() {
    for user in users() {
        let world = World::with_config(user, "tiers = [\"mount\"]\n");
        for mode in [SandboxMode::ReadOnly, SandboxMode::WorkspaceWrite] {
            let ran = world.run(mode, "touch /tmp/dsh-ran-unconfined");
            let expected = format!(
                "dsh-exec: sandbox mode \"{mode}\" is requested but no sandbox backend is usable on this host; \
                 refusing to run the command unconfined."
            );
            assert!(ran.stderr.starts_with(&expected), "{:?}", ran.stderr);
            assert_eq!((ran.code(), ran.stdout.len(), ran.stderr.lines().count()), (125, 0, 1));
            assert!(!fs::exists("/tmp/dsh-ran-unconfined").unwrap());
        }
        assert_eq!(world.run(SandboxMode::DangerFullAccess, "echo free").text(), "free");
    }
}

#[test]
fn a_required_guarantee_that_is_missing_is_named() {
    let world = World::with_config(
        users()[0],
        "tiers = [\"landlock\"]\nnetwork = \"loopback\"\nrequire = [\"network\"]\n",
    );
    let ran = world.run(SandboxMode::ReadOnly, "true");
    assert_eq!(ran.code(), 125);
    assert!(
        ran.stderr.contains("sandbox mode \"read-only\" is requested but")
            && ran.stderr.contains("network is required and cannot be kept"),
        "{:?}",
        ran.stderr
    );
}

#[test]
fn a_bound_of_the_deployment_narrows_and_the_result_says_so() {
    for user in users() {
        let world = World::with_config(user, "maxMode = \"read-only\"\n");
        for asked in [SandboxMode::WorkspaceWrite, SandboxMode::DangerFullAccess] {
            let ran = world.run(asked, "touch x");
            let report = ran.result().sandbox;
            assert_eq!(report.mode, SandboxMode::ReadOnly);
            assert_eq!(report.confined.unwrap().requested_mode, Some(asked));
            assert_eq!(ran.facts().len(), 1);
            assert!(!world.workspace().join("x").exists());
        }
    }
}

#[test]
fn a_missing_shell_is_told_apart_from_a_failing_command() {
    for user in users() {
        let world = World::with_config(user, "shell = \"/nowhere/bash\"\n");
        for mode in SandboxMode::ALL {
            let mut asked = request("true");
            asked.sandbox_policy = Some(PolicyRequest {
                mode: Some(*mode),
                ..PolicyRequest::default()
            });
            if user.id() == rustix::process::geteuid().as_raw() {
                assert_eq!(error_of(&world, asked).code, ErrorCode::ShellMissing, "{mode}");
            }
            let ran = world.run(*mode, "true");
            assert_eq!((ran.code(), ran.stdout.len()), (125, 0), "{user:?} {mode}");
            assert!(ran.stderr.contains("bash"), "{:?}", ran.stderr);
        }
    }
}

#[test]
fn a_missing_or_foreign_helper_is_an_error_that_says_where_it_was_looked_for() {
    for user in users() {
        for broken in ["missing", "not executable", "another program"] {
            let world = World::without_daemon(user, "");
            let helper = world.binary("dsh-exec-helper");
            fs::remove_file(&helper).unwrap();
            match broken {
                "missing" => {}
                "another program" => {
                    fs::write(&helper, "#!/bin/sh\nexit 0\n").unwrap();
                    fs::set_permissions(&helper, fs::Permissions::from_mode(0o755)).unwrap();
                }
                _ => fs::write(&helper, "").unwrap(),
            }
            let mut world = world;
            world.start_daemon();
            for mode in SandboxMode::ALL {
                let ran = world.run(*mode, "touch ran");
                assert_eq!(
                    (ran.code(), ran.stdout.len()),
                    (125, 0),
                    "{user:?} {broken} {mode}: {ran:?}"
                );
                assert!(ran.stderr.contains("helper"), "{broken} {mode}: {:?}", ran.stderr);
                assert_eq!(ran.stderr.lines().count(), 1, "{:?}", ran.stderr);
            }
            assert!(!world.workspace().join("ran").exists());
        }
    }
}

#[test]
fn without_a_daemon_the_error_names_the_socket() {
    let world = World::without_daemon(users()[0], "");
    for options in [["run", "--socket"].as_slice(), &["run", "--no-autostart", "--socket"]] {
        let output = world
            .dsh_exec(&[])
            .args(options)
            .arg(world.socket())
            .args(["--", "touch ran"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(125), "{text}");
        assert!(
            text.starts_with("dsh-exec: ") && text.contains(world.socket().to_str().unwrap()),
            "{text:?}"
        );
        assert_eq!(text.lines().count(), 1, "{text:?}");
    }
}
