//! The command line: exit codes, output forms, starting the daemon, and everything that is not `run`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::fs;
use std::process::{Output, Stdio};
use std::time::Duration;

use dsh_policy::BashRunResult;
use dsh_tests::process::{all, wait_until};
use dsh_tests::{World, users};
use rustix::process::Signal;

fn exec(world: &World, arguments: &[&str]) -> Output {
    let (first, rest) = arguments.split_first().unwrap();
    world
        .dsh_exec(&[OsStr::new(first), OsStr::new("--socket"), world.socket().as_os_str()])
        .args(rest)
        .output()
        .unwrap()
}
fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn the_exit_code_is_the_command_s() {
    for user in users() {
        let world = World::new(user);
        for (command, code) in [
            ("true", 0),
            ("false", 1),
            ("exit 124", 124),
            ("exit 125", 125),
            ("exit 255", 255),
            ("no-such-program-anywhere", 127),
            ("kill -TERM $$", 143),
            ("kill -KILL $$", 137),
        ] {
            for form in [&["run"][..], &["run", "--json"], &["run", "--render"]] {
                let output = exec(&world, &[form, &["--", command]].concat());
                assert_eq!(output.status.code(), Some(code), "{form:?} {command}: {output:?}");
            }
        }
        assert_eq!(
            exec(&world, &["run", "--timeout-ms", "200", "--", "sleep 9"])
                .status
                .code(),
            Some(124)
        );
        assert_eq!(
            exec(
                &world,
                &["run", "--timeout-ms", "200", "--", "trap 'exit 0' TERM; sleep 9 & wait"]
            )
            .status
            .code(),
            Some(124)
        );
    }
}

#[test]
fn wrong_usage_is_exit_code_two_with_help_and_runs_nothing() {
    let world = World::new(users()[0]);
    for arguments in [
        &["run"][..],
        &["run", "--mode", "wide", "--", "touch ran"],
        &["run", "--no-such-flag", "touch ran"],
        &["run", "--timeout-ms", "soon", "--", "touch ran"],
        &["run", "--env", "NOVALUE", "--", "touch ran"],
        &["run", "--json", "--render", "--", "touch ran"],
        &["run", "--", "touch", "ran"],
        &["no-such-command"],
    ] {
        let output = if arguments[0] == "run" {
            exec(&world, arguments)
        } else {
            world.dsh_exec(&[]).args(arguments).output().unwrap()
        };
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
    assert!(!world.workspace().join("ran").exists());
}

#[test]
fn json_is_exactly_one_object_and_nothing_else() {
    for user in users() {
        let world = World::new(user);
        for command in [
            "echo out; echo err >&2; exit 3",
            "touch /var/tmp/dsh-refused",
            "kill -9 $$",
            "true",
        ] {
            let output = exec(&world, &["run", "--json", "--", command]);
            let line = text(&output.stdout);
            assert_eq!((line.matches('\n').count(), line.ends_with('\n')), (1, true), "{line}");
            let value: serde_json::Value = serde_json::from_str(&line).unwrap();
            let result: BashRunResult = serde_json::from_value(value.clone()).unwrap();
            assert_eq!(result.exit_code.is_none(), result.signal.is_some(), "{line}");
            let keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
            let mut expected = [
                "exitCode",
                "signal",
                "timedOut",
                "aborted",
                "timeoutMs",
                "stdout",
                "stderr",
                "sandbox",
                "environment",
                "survivors",
                "usage",
            ];
            expected.sort_unstable();
            assert_eq!(keys, expected);
            assert!(output.stderr.is_empty(), "{:?}", text(&output.stderr));
        }
    }
}

/// The example of the contract's section 2: names and shapes of every field.
#[test]
fn the_result_has_the_shape_of_the_contract() {
    let world = World::new(users()[0]);
    let output = exec(
        &world,
        &[
            "run",
            "--mode",
            "workspace-write",
            "--json",
            "--",
            "echo hello; echo x > ~/x",
        ],
    );
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["exitCode"], 1);
    assert_eq!(value["signal"], serde_json::Value::Null);
    assert_eq!(value["timeoutMs"], 120_000);
    assert_eq!(
        value["stdout"],
        serde_json::json!({"text": "hello\n", "truncated": false, "bytes": 6})
    );
    let sandbox = &value["sandbox"];
    assert_eq!(
        (
            &sandbox["mode"],
            &sandbox["denied"],
            &sandbox["observed"],
            &sandbox["denialsDropped"]
        ),
        (&"workspace-write".into(), &true.into(), &true.into(), &0.into())
    );
    let fact = &sandbox["denials"][0];
    assert_eq!(fact["operation"], "create-file");
    assert_eq!(fact["syscall"], "openat");
    assert_eq!(fact["path"], world.home().join("x").to_str().unwrap());
    assert_eq!(
        (&fact["errno"], &fact["rule"], &fact["count"]),
        (&"EACCES".into(), &"outside-writable-roots".into(), &1.into())
    );
    assert!(fact["pid"].is_u64() && fact["executable"].is_string());
    for field in ["wallMs", "userMs", "systemMs", "maxRssKib"] {
        assert!(value["usage"][field].is_u64(), "{field}");
    }
    assert!(value["usage"]["maxRssKib"].as_u64().unwrap() > 500);
}

#[test]
fn a_refusal_is_one_short_line_at_the_end_of_stderr() {
    for user in users() {
        let world = World::new(user);
        let script = format!(
            "echo mine >&2; touch {}/x 2>/dev/null; exit 5",
            world.outside().display()
        );
        let output = exec(&world, &["run", "--mode", "workspace-write", "--", &script]);
        let stderr = text(&output.stderr);
        let lines: Vec<&str> = stderr.lines().collect();
        assert_eq!(
            (output.status.code(), lines.len(), lines[0]),
            (Some(5), 2, "mine"),
            "{stderr}"
        );
        let start = format!(
            "dsh-exec: refused: create-file {}/x: EACCES (outside-writable-roots) in ",
            world.outside().display()
        );
        assert!(lines[1].starts_with(&start), "{}", lines[1]);
        assert!(!stderr.contains('\u{1b}'), "no colours into a pipe");
    }
}

/// Rows of contract section 4 that need a real run; the client's own tests have the rest.
#[test]
fn render_gives_the_model_s_text() {
    let world = World::new(users()[0]);
    let rows: &[(&[&str], &str, &str)] = &[
        (&[], "true", "(no output)"),
        (&[], "echo hi", "hi\n"),
        (
            &[],
            "echo out; echo err >&2; exit 3",
            "out\n[stderr]\nerr\n[exit code: 3]",
        ),
        (&[], "printf out; exit 3", "out\n[exit code: 3]"),
        (&[], "kill -9 $$", "(no output)\n[killed by signal: SIGKILL]"),
        (
            &["--timeout-ms", "200"],
            "trap 'exit 0' TERM; echo early; sleep 9 & wait",
            "early\n[timed out after 200ms]",
        ),
        (
            &[],
            "echo x 2>/dev/null > /var/tmp/dsh-refused",
            "(no output)\n[sandbox: file access denied under read-only mode]\n[exit code: 1]",
        ),
    ];
    for (options, command, expected) in rows {
        let output = exec(&world, &[&["run", "--render"], *options, &["--", command]].concat());
        let shown = text(&output.stdout);
        assert!(
            shown == *expected || shown == format!("{expected}\n"),
            "{command}: {shown:?} instead of {expected:?}"
        );
        assert!(output.stderr.is_empty(), "{command}: {:?}", text(&output.stderr));
    }
    let shown = text(&exec(&world, &["run", "--render", "--", "seq 100000"]).stdout);
    let marker = shown.trim_end().lines().last().unwrap().to_owned();
    let path = marker
        .strip_prefix("[output truncated; full output: ")
        .and_then(|rest| rest.strip_suffix(']'));
    assert_eq!(fs::read(path.expect("a spill path")).unwrap().len(), 588_895);
}

#[test]
fn command_text_arrives_byte_for_byte() {
    let world = World::new(users()[0]);
    for (command, expected) in [
        (r#"printf %s 'a!b "$x" `y` \ é'"#, r#"a!b "$x" `y` \ é"#),
        ("-v 2>/dev/null; echo dash", "dash\n"),
        ("#!/bin/false\necho comment", "comment\n"),
        ("cat <<'X'\nhere $HOME\nX", "here $HOME\n"),
        ("echo one\necho two", "one\ntwo\n"),
    ] {
        let output = exec(&world, &["run", "--", command]);
        assert_eq!(text(&output.stdout), expected, "{command}");
    }
    // The shell keeps a large here-document in a file, so it needs a mode with one.
    let here = format!("cat <<'X' | wc -c\n{}\nX", "y".repeat(100_000));
    let output = exec(&world, &["run", "--mode", "workspace-write", "--", &here]);
    assert_eq!(text(&output.stdout).trim(), "100001");
}

fn daemons_of(world: &World) -> Vec<u32> {
    let path = world.binary("dsh-execd");
    all()
        .filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == path))
        .collect()
}

#[test]
fn clients_without_a_daemon_start_exactly_one_that_leaves_when_idle() {
    for user in users() {
        let world = World::without_daemon(user, "idleExitMs = 700\n");
        let clients: Vec<_> = (0..20)
            .map(|n| {
                let mut command = world.dsh_exec(&["run", "--mode", "workspace-write", "--"].map(OsStr::new));
                command
                    .arg(format!("sleep 0.3; echo {n}"))
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        let mut most = 0;
        for (n, client) in clients.into_iter().enumerate() {
            let output = client.wait_with_output().unwrap();
            assert_eq!(
                (text(&output.stdout), text(&output.stderr)),
                (format!("{n}\n"), String::new()),
                "{user:?}"
            );
            most = most.max(daemons_of(&world).len());
        }
        assert_eq!(most, 1, "{user:?}: twenty clients, one daemon");
        assert!(
            wait_until(Duration::from_secs(5), || daemons_of(&world).is_empty()),
            "the daemon stays though idle"
        );
        assert!(!world.socket().exists());
    }
}

#[test]
fn status_config_completions_and_help_answer() {
    let world = World::with_config(users()[0], "keptBytes = 1234\n");
    let status: dsh_policy::wire::DaemonStatus =
        serde_json::from_slice(&exec(&world, &["status", "--json"]).stdout).unwrap();
    assert_eq!(
        (status.pid, status.socket.to_path_buf(), status.draining),
        (world.daemon_pid(), world.socket(), false)
    );
    let shown = text(&exec(&world, &["config", "show"]).stdout);
    assert!(
        shown.contains("keptBytes = 1234") && shown.contains("maxTimeoutMs = 600000"),
        "{shown}"
    );
    let path = text(
        &world
            .dsh_exec(&["config", "path"].map(OsStr::new))
            .output()
            .unwrap()
            .stdout,
    );
    assert_eq!(path.trim_end(), world.config_file().to_str().unwrap());
    for shell in ["bash", "zsh", "fish"] {
        let output = world
            .dsh_exec(&["completions", shell].map(OsStr::new))
            .output()
            .unwrap();
        assert!(
            output.status.success() && text(&output.stdout).contains("dsh-exec"),
            "{shell}"
        );
    }
    for arguments in [
        &["--help"][..],
        &["run", "--help"],
        &["doctor", "--help"],
        &["config", "--help"],
        &["status", "--help"],
    ] {
        let output = world.dsh_exec(&[]).args(arguments).output().unwrap();
        assert!(
            output.status.success() && text(&output.stdout).contains("Usage: "),
            "{arguments:?}"
        );
    }
    let version = text(&world.dsh_exec(&["--version".as_ref()]).output().unwrap().stdout);
    assert_eq!(version.trim(), format!("dsh-exec {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_new_configuration_is_taken_on_hangup_and_a_bad_one_is_not() {
    for user in users() {
        let world = World::new(user);
        let current = || text(&exec(&world, &["config", "show"]).stdout);
        assert!(current().contains("keptBytes = 64000"));
        world.write(&world.config_file(), b"keptBytes = 4321\n");
        world.signal_daemon(Signal::HUP);
        assert!(
            wait_until(Duration::from_secs(3), || current().contains("keptBytes = 4321")),
            "{}",
            current()
        );
        world.write(&world.config_file(), b"\nkeptBites = 1\n");
        world.signal_daemon(Signal::HUP);
        assert!(
            wait_until(Duration::from_secs(3), || world.log().contains("keptBites")),
            "the log names the key: {}",
            world.log()
        );
        assert!(current().contains("keptBytes = 4321"));
    }
}

#[test]
fn a_configuration_with_an_unknown_key_is_refused_with_its_line() {
    let world = World::without_daemon(users()[0], "mode = \"read-only\"\nkeptBites = 1\n");
    let output = world
        .command(world.binary("dsh-execd"))
        .arg("--check-config")
        .output()
        .unwrap();
    let stderr = text(&output.stderr);
    assert!(!output.status.success());
    assert!(
        stderr.contains("keptBites") && stderr.contains("config.toml") && stderr.contains('2'),
        "{stderr}"
    );
}

#[test]
fn both_presets_are_written_are_valid_and_differ() {
    let world = World::without_daemon(users()[0], "");
    let mut written = Vec::new();
    for preset in ["compatible", "strict"] {
        fs::remove_file(world.config_file()).unwrap();
        let init = world
            .dsh_exec(&["config", "init", "--preset", preset].map(OsStr::new))
            .output()
            .unwrap();
        assert!(init.status.success(), "{init:?}");
        let check = world
            .command(world.binary("dsh-execd"))
            .arg("--check-config")
            .output()
            .unwrap();
        assert!(check.status.success(), "{preset}: {check:?}");
        written.push(fs::read_to_string(world.config_file()).unwrap());
        let again = world
            .dsh_exec(&["config", "init", "--preset", preset].map(OsStr::new))
            .output()
            .unwrap();
        assert!(!again.status.success(), "an existing file is not overwritten");
    }
    assert_ne!(written[0], written[1]);
}

#[test]
fn every_command_has_a_manual_page() {
    let world = World::new(users()[0]);
    let dir = world.home().join("man1");
    let output = world
        .dsh_exec(&["man".as_ref(), "--dir".as_ref(), dir.as_os_str()])
        .output()
        .unwrap();
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    for page in [
        "dsh-exec",
        "dsh-exec-run",
        "dsh-exec-tasks-output",
        "dsh-exec-config-init",
        "dsh-exec-mcp",
    ] {
        let page = fs::read_to_string(dir.join(format!("{page}.1"))).unwrap_or_else(|error| panic!("{page}: {error}"));
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
    let page = text(&world.dsh_exec(&["man"].map(OsStr::new)).output().unwrap().stdout);
    assert!(
        page.contains(".TH dsh\\-exec 1") || page.contains(".TH dsh-exec 1"),
        "{page}"
    );
    let daemon = world.command(world.binary("dsh-execd")).arg("--man").output().unwrap();
    assert!(
        text(&daemon.stdout).contains("SIGHUP reads the configuration again"),
        "{daemon:?}"
    );
}

#[test]
fn a_path_is_explained_as_a_command_would_be_judged() {
    for user in users() {
        let world = World::new(user);
        let (inside, outside) = (world.workspace().join(".git/config"), world.outside().join("f"));
        let options = ["--mode", "workspace-write", "--workspace"];
        let workspace = world.workspace();
        let ask = |more: &[&str]| {
            let mut command = world.dsh_exec(&["--socket".as_ref(), world.socket().as_os_str(), "explain".as_ref()]);
            command.args(options).arg(&workspace).args(more).output().unwrap()
        };
        let paths = [inside.to_str().unwrap(), outside.to_str().unwrap()];
        let shown = text(&ask(&paths).stdout);
        let expected = format!(
            "{}\n  read-file     allowed\n  write-file    refused: EACCES (protected-path) (allowed by: mode danger-full-access)\n",
            inside.display()
        );
        assert!(shown.starts_with(&expected), "{shown}");
        let outside_line = format!(
            "{}\n  read-file     allowed\n  write-file    refused: EACCES (outside-writable-roots) (allowed by: writable {})\n",
            outside.display(),
            world.outside().display()
        );
        assert!(shown.contains(&outside_line), "{shown}");
        // The same as when it is tried.
        let tried = world.run(
            dsh_policy::SandboxMode::WorkspaceWrite,
            format!("echo > {}", outside.display()),
        );
        let fact = &tried.facts()[0];
        let json: serde_json::Value = serde_json::from_slice(&ask(&["--json", paths[1]]).stdout).unwrap();
        let create = &json[0]["operations"][2];
        assert_eq!(create["operation"], "create-file");
        assert_eq!(create["rule"], serde_json::to_value(fact.rule).unwrap());
        assert_eq!(create["allowedBy"], serde_json::to_value(&fact.allowed_by).unwrap());
        assert!(!outside.exists());
    }
}
