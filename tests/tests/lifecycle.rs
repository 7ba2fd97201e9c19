//! Beginnings and ends: timeouts, kills, daemons and helpers that die, many commands at once. Nothing of a command survives its result.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;
use std::time::Duration;

use dsh_policy::SandboxMode::{self, DangerFullAccess, ReadOnly, WorkspaceWrite};
use dsh_tests::process::{children, command_line, marked, unique_mark, wait_until};
use dsh_tests::{Ran, World, users};
use rustix::process::Signal;

/// Between SIGTERM and SIGKILL in these tests; what ignores SIGTERM takes this long.
const GRACE: Duration = Duration::from_millis(400);
const CONFIG: &str = "killGraceMs = 400\n";
/// What a loaded machine of two processors may add.
const SLACK: Duration = Duration::from_millis(1_500);

fn run_marked(world: &World, mode: SandboxMode, options: &[&str], command: &str) -> (Ran, String) {
    let mark = unique_mark("lifecycle");
    let mut all = vec!["--env", mark.as_str()];
    all.extend(options);
    let all: Vec<_> = all
        .iter()
        .map(|text| std::ffi::OsStr::from_bytes(text.as_bytes()))
        .collect();
    let ran = world.run_with(mode, &all, command);
    (ran, mark)
}

/// Every way in which a process tries to stay, in every mode: gone when the result is there.
#[test]
fn nothing_survives_a_timeout() {
    let commands = [
        ("foreground", "echo early; sleep 1000"),
        ("background", "sleep 1000 & sleep 1000 & echo early; wait"),
        (
            "new session",
            "setsid sleep 1000 & (trap '' TERM; sleep 1000) & echo early; sleep 1000",
        ),
        (
            "traps",
            "trap '' TERM INT HUP; echo early; while :; do sleep 0.05; done",
        ),
        (
            "double fork",
            "(setsid bash -c 'setsid sleep 1000 & disown; exit' & ) ; echo early; sleep 1000",
        ),
        ("stopped", "sleep 1000 & kill -STOP $!; echo early; sleep 1000"),
        (
            "fork storm",
            "echo early; f() { while :; do (setsid sleep 0.2 &) ; sleep 0.01; done; }; f & f & f",
        ),
        (
            "loop of output",
            "echo early; (while :; do echo x; sleep 0.1; done) & sleep 1000",
        ),
    ];
    for user in users() {
        let world = World::with_config(user, CONFIG);
        for mode in SandboxMode::ALL {
            for (name, command) in commands {
                let what = format!("{user:?} {mode} {name}");
                let (ran, mark) = run_marked(&world, *mode, &["--timeout-ms", "500"], command);
                let left = marked(&mark);
                let result = ran.result();
                assert!(result.timed_out && !result.aborted, "{what}: {result:?}");
                assert_eq!(result.timeout_ms, 500, "{what}");
                assert!(result.stdout.text.starts_with("early\n"), "{what}: {result:?}");
                assert_eq!(result.survivors, 0, "{what}");
                assert_eq!(left, vec![], "{what}");
                assert!(ran.elapsed >= Duration::from_millis(500), "{what}: {:?}", ran.elapsed);
                assert!(
                    ran.elapsed < Duration::from_millis(500) + GRACE + SLACK,
                    "{what}: {:?}",
                    ran.elapsed
                );
            }
        }
    }
}

#[test]
fn without_a_trap_the_grace_is_not_spent() {
    for user in users() {
        let world = World::new(user);
        let (ran, _) = run_marked(&world, ReadOnly, &["--timeout-ms", "300"], "sleep 1000");
        let result = ran.result();
        assert_eq!((result.exit_code, result.signal.as_deref()), (None, Some("SIGTERM")));
        assert!(ran.elapsed < Duration::from_millis(300) + SLACK, "{:?}", ran.elapsed);
    }
}

#[test]
fn a_trap_that_exits_with_zero_after_the_timeout_is_still_timed_out() {
    for user in users() {
        let world = World::new(user);
        let (ran, _) = run_marked(
            &world,
            ReadOnly,
            &["--timeout-ms", "300"],
            "trap 'echo bye; exit 0' TERM; sleep 1000 & wait",
        );
        let result = ran.result();
        assert_eq!(
            (result.timed_out, result.exit_code, result.signal),
            (true, Some(0), None)
        );
        assert_eq!(result.stdout.text, "bye\n");
    }
}

#[test]
fn leftovers_of_a_finished_command_are_ended_and_do_not_hold_the_result() {
    for user in users() {
        let world = World::new(user);
        for mode in SandboxMode::ALL {
            for command in [
                "sleep 1000 & echo hi",
                "setsid sleep 1000 & exit 0",
                "(setsid bash -c 'trap \"\" TERM; sleep 1000' &) ; echo hi",
            ] {
                let (ran, mark) = run_marked(&world, *mode, &[], command);
                let left = marked(&mark);
                assert_eq!(left, vec![], "{user:?} {mode} {command}");
                let result = ran.result();
                assert_eq!(
                    (result.exit_code, result.survivors, result.timed_out),
                    (Some(0), 0, false),
                    "{command}"
                );
                assert!(ran.elapsed < SLACK, "{user:?} {mode} {command}: {:?}", ran.elapsed);
            }
        }
    }
}

#[test]
fn output_of_a_process_substitution_is_waited_for() {
    for user in users() {
        let world = World::new(user);
        let (ran, _) = run_marked(&world, WorkspaceWrite, &[], "exec > >(tee log); echo hi");
        assert_eq!(ran.result().stdout.text, "hi\n");
        assert_eq!(fs::read(world.workspace().join("log")).unwrap(), b"hi\n");
    }
}

#[test]
fn a_shell_that_dies_from_a_signal_says_so_in_every_mode() {
    for user in users() {
        let world = World::new(user);
        for mode in SandboxMode::ALL {
            for (number, name) in [
                (9, "SIGKILL"),
                (11, "SIGSEGV"),
                (15, "SIGTERM"),
                (6, "SIGABRT"),
                (34, "SIGRTMIN"),
                (64, "SIGRTMIN+30"),
            ] {
                let ran = world.run(*mode, format!("kill -{number} $$; sleep 5"));
                let result = ran.result();
                assert_eq!(
                    (result.exit_code, result.signal.as_deref()),
                    (None, Some(name)),
                    "{mode}"
                );
                assert!(!result.timed_out && !result.aborted);
                assert_eq!(ran.code(), 128 + number, "{mode}");
            }
        }
    }
}

#[test]
fn standard_input_ends_at_once_or_after_its_bytes() {
    for user in users() {
        let world = World::new(user);
        let ran = world.run(ReadOnly, "cat; echo end");
        assert_eq!(ran.text(), "end");
        assert!(ran.elapsed < SLACK);

        let file = world.folder().join("input");
        let bytes: Vec<u8> = (0..300_000u32).map(|n| (n % 251) as u8).collect();
        fs::write(&file, &bytes).unwrap();
        let ran = world.run_with(ReadOnly, &["--stdin".as_ref(), file.as_os_str()], "wc -c; cat");
        assert_eq!(ran.text(), "300000");
        // A command that does not read its input is not held up by it.
        let ran = world.run_with(ReadOnly, &["--stdin".as_ref(), file.as_os_str()], "echo done");
        assert_eq!(ran.text(), "done");
    }
}

/// Runs something that stays, does `act` to the machine, and wants every process of the command gone within a second.
fn gone_within_a_second(world: &mut World, mode: SandboxMode, act: impl FnOnce(&mut World)) -> Ran {
    let mark = unique_mark("fatal");
    let options = ["--env", mark.as_str()].map(std::ffi::OsStr::new);
    let command = "setsid sleep 1000 & (trap '' TERM; sleep 1000) & echo up > $TMPDIR/up 2>/dev/null; sleep 1000";
    let child = world
        .json_command(mode, &options, command)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert!(
        wait_until(Duration::from_secs(10), || marked(&mark).len() >= 3),
        "the command never got going: {:?}",
        marked(&mark)
    );
    act(world);
    let ended = wait_until(Duration::from_secs(1), || marked(&mark).is_empty());
    assert!(ended, "alive after a second: {:?}", marked(&mark));
    Ran::of(child.wait_with_output().unwrap())
}

/// What has executed another program than the helper. A process that has just ended has no command line any more.
fn is_command(pid: u32) -> bool {
    let line = command_line(pid);
    !line.is_empty() && !line.contains("dsh-exec-helper")
}

/// A helper, or the child that a waiting helper prepares for its command.
fn is_helper(pid: u32) -> bool {
    command_line(pid).contains("dsh-exec-helper")
}

#[test]
fn a_daemon_that_is_killed_leaves_no_command() {
    for user in users() {
        for mode in SandboxMode::ALL {
            let mut world = World::new(user);
            let ran = gone_within_a_second(&mut world, *mode, |world| {
                world.signal_daemon(Signal::KILL);
                let _ = world.wait_for_daemon();
            });
            assert_eq!(ran.code(), 125, "the fate is unknown, never success: {ran:?}");
            assert_eq!(ran.stdout, b"", "{ran:?}");
            assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
            // And the next daemon works, on the same socket.
            world.start_daemon();
            assert_eq!(world.run(*mode, "echo again").text(), "again");
        }
    }
}

#[test]
fn a_helper_that_is_killed_leaves_no_command_and_no_success() {
    for user in users() {
        for mode in SandboxMode::ALL {
            let mut world = World::new(user);
            let ran = gone_within_a_second(&mut world, *mode, |world| {
                let busy: Vec<u32> = children(world.daemon_pid())
                    .into_iter()
                    .filter(|pid| is_helper(*pid) && children(*pid).into_iter().any(is_command))
                    .collect();
                assert_eq!(busy.len(), 1, "one helper has a command");
                dsh_tests::process::signal(busy[0], Signal::KILL);
            });
            assert_eq!(ran.code(), 125, "{ran:?}");
            assert_eq!(ran.stderr.lines().count(), 1, "{ran:?}");
            assert_eq!(world.run(*mode, "echo again").text(), "again");
        }
    }
}

#[test]
fn a_client_that_is_killed_takes_its_command_with_it() {
    for user in users() {
        let world = World::new(user);
        let mark = unique_mark("client");
        let options = ["--env", mark.as_str()].map(std::ffi::OsStr::new);
        let mut child = world
            .json_command(WorkspaceWrite, &options, "setsid sleep 1000 & sleep 1000")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        assert!(wait_until(Duration::from_secs(10), || marked(&mark).len() >= 2));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(
            wait_until(Duration::from_secs(1), || marked(&mark).is_empty()),
            "{:?}",
            marked(&mark)
        );
    }
}

#[test]
fn a_daemon_told_to_stop_gives_the_results_and_removes_its_socket() {
    for user in users() {
        let mut world = World::new(user);
        let mark = unique_mark("drain");
        let options = ["--env", mark.as_str()].map(std::ffi::OsStr::new);
        let child = world
            .json_command(ReadOnly, &options, "echo early; sleep 1000")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        assert!(wait_until(Duration::from_secs(10), || !marked(&mark).is_empty()));
        std::thread::sleep(Duration::from_millis(200)); // past its first output
        world.signal_daemon(Signal::TERM);
        let result = Ran::of(child.wait_with_output().unwrap()).result();
        assert_eq!((result.aborted, result.timed_out, result.survivors), (true, false, 0));
        assert_eq!(result.stdout.text, "early\n");
        assert_eq!(world.wait_for_daemon().code(), Some(0));
        assert!(!world.socket().exists());
        assert_eq!(marked(&mark), vec![]);
    }
}

#[test]
fn nothing_is_left_on_disk_or_in_the_daemon() {
    for user in users() {
        let world = World::new(user);
        let used: Vec<String> = [
            "mkdir -p $TMPDIR/a/b; chmod 0 $TMPDIR/a/b; ln -s / $TMPDIR/root",
            "mktemp > /dev/null; sleep 1000 & true",
        ]
        .into_iter()
        .map(|command| {
            world
                .run(WorkspaceWrite, format!("({command}); stat -c %a $TMPDIR; echo $TMPDIR"))
                .text()
        })
        .collect();
        for text in used {
            let (mode, folder) = text.split_once('\n').expect("two lines");
            assert_eq!(mode, "700");
            assert!(folder.starts_with(&format!("/tmp/dsh-{}-", user.id())), "{folder}");
            assert!(!fs::exists(folder).unwrap(), "{folder} is still there");
        }
        // One helper or two may wait; none is a zombie and none has a child but the one that it has prepared.
        for child in children(world.daemon_pid()) {
            let state = dsh_tests::process::status_field(child, "State:").unwrap_or_default();
            assert!(!state.starts_with('Z'), "{child} {state}");
            let others: Vec<u32> = children(child).into_iter().filter(|pid| !is_helper(*pid)).collect();
            assert_eq!(others, Vec::<u32>::new());
        }
        let descriptors = || {
            fs::read_dir(format!("/proc/{}/fd", world.daemon_pid()))
                .unwrap()
                .count()
        };
        // Two waiting helpers (the default) are part of a settled daemon; right after a command the next one is still being started.
        let pool_is_full = || wait_until(Duration::from_secs(5), || children(world.daemon_pid()).len() == 2);
        assert!(pool_is_full());
        let settled = descriptors();
        for _ in 0..20 {
            assert_eq!(world.run(ReadOnly, "true").code(), 0);
        }
        assert!(pool_is_full());
        assert!(
            wait_until(Duration::from_secs(2), || descriptors() <= settled),
            "{} > {settled}",
            descriptors()
        );
    }
}

#[test]
fn two_hundred_commands_at_once_each_get_their_own_result() {
    for user in users() {
        let world = World::new(user);
        let mark = unique_mark("many");
        let options = ["--env", mark.as_str()].map(std::ffi::OsStr::new);
        let children: Vec<_> = (0..200)
            .map(|n| {
                let command = format!("echo out {n}; echo err {n} >&2; echo {n} > own-{n}; exit {}", n % 120);
                let mut process = world.json_command(WorkspaceWrite, &options, command);
                process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        for (n, child) in children.into_iter().enumerate() {
            let ran = Ran::of(child.wait_with_output().unwrap());
            let result = ran.result();
            assert_eq!(result.exit_code, Some(n as i32 % 120), "{n}: {ran:?}");
            assert_eq!(
                (result.stdout.text, result.stderr.text),
                (format!("out {n}\n"), format!("err {n}\n"))
            );
            assert_eq!(result.survivors, 0);
            assert_eq!(
                fs::read_to_string(world.workspace().join(format!("own-{n}"))).unwrap(),
                format!("{n}\n")
            );
        }
        assert_eq!(marked(&mark), vec![]);
    }
}

#[test]
fn a_command_signals_only_its_own_processes() {
    for user in users() {
        let world = World::new(user);
        let mut bystander = world.command("/bin/sleep").arg("1000").spawn().unwrap();
        let pid = bystander.id().to_string();
        let refused = world.run(WorkspaceWrite, world.probe(&["kill-term".into(), pid.clone()]));
        assert_eq!(refused.text(), "EPERM", "{user:?}");
        let _ = world.run(WorkspaceWrite, "kill -TERM -1; true");
        assert!(
            bystander.try_wait().unwrap().is_none(),
            "{user:?}: a process outside was killed"
        );
        assert_eq!(world.run(ReadOnly, "echo the daemon lives").text(), "the daemon lives");
        assert_eq!(
            world
                .run(DangerFullAccess, world.probe(&["kill-term".into(), pid]))
                .text(),
            "OK"
        );
        bystander.wait().unwrap();
        assert_eq!(
            world
                .run(WorkspaceWrite, "sleep 100 & kill $!; wait $!; echo $?")
                .text(),
            "143"
        );
    }
}

/// What the kernel says about a confined process, from inside.
#[test]
fn a_confined_command_has_no_privilege_and_nothing_inherited() {
    for user in users() {
        let world = World::new(user);
        for mode in [ReadOnly, WorkspaceWrite] {
            let text = world
                .run(
                    mode,
                    "cat /proc/self/status; echo FDS; ls /proc/$$/fd; ps -o tty= -p $$; ps -o sid= -p $$; echo $$",
                )
                .text();
            for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
                assert!(
                    text.contains(&format!("{set}:\t0000000000000000")),
                    "{user:?} {mode} {text}"
                );
            }
            if user == dsh_tests::User::Root {
                assert!(text.contains("CapBnd:\t0000000000000000"), "{mode} {text}");
            }
            assert!(
                text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"),
                "{user:?} {mode} {text}"
            );
            let tail = text.split("FDS\n").nth(1).unwrap();
            assert!(tail.starts_with("0\n1\n2\n"), "{user:?} {mode} {tail}");
            let rest: Vec<&str> = tail
                .lines()
                .skip(3)
                .map(str::trim)
                .filter(|line| *line != "255")
                .collect();
            assert_eq!(rest[0], "?", "no controlling terminal: {tail}");
            assert_eq!(rest[1], rest[2], "the shell leads its own session: {tail}");
        }
    }
}

#[test]
fn what_ignores_a_sigterm_gets_the_default_grace_and_no_more() {
    let world = World::new(users()[0]);
    let begun = std::time::Instant::now();
    let (ran, mark) = run_marked(
        &world,
        ReadOnly,
        &["--timeout-ms", "200"],
        "trap '' TERM; while :; do sleep 0.05; done",
    );
    assert_eq!(ran.result().signal.as_deref(), Some("SIGKILL"));
    assert!(begun.elapsed() >= Duration::from_millis(3_200), "{:?}", begun.elapsed());
    assert!(
        begun.elapsed() < Duration::from_millis(3_200) + SLACK,
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(marked(&mark), vec![]);
}
