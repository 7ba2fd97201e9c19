//! From a plan to the proof that nothing is left, with the real helper on the real kernel.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod support;

use std::path::PathBuf;
use std::time::Duration;

use dsh_policy::mode::{Guarantee, Network};
use dsh_policy::plan::{ExitStatus, FromHelper, Step, ToHelper};
use support::{Run, confinement, helper, plan, run};

#[test]
fn a_command_s_output_exit_code_and_signal_come_back() {
    for sandbox in [None, Some(confinement(&[]))] {
        let outcome = run("echo out; echo err >&2; exit 7", sandbox.clone());
        assert_eq!(
            (outcome.code(), outcome.stdout.as_str(), outcome.stderr.as_str()),
            (7, "out\n", "err\n")
        );
        assert_eq!(outcome.report().survivors, 0);
        let outcome = run("kill -9 $$", sandbox);
        assert_eq!(outcome.report().status, ExitStatus::Signal(9));
        assert!(outcome.events.contains(&FromHelper::ShellExited(ExitStatus::Signal(9))));
    }
}

#[test]
fn the_environment_is_the_plan_s_and_nothing_else() {
    let outcome = run(
        "tr '\\0' '\\n' </proc/$$/environ | sort; ls /proc/$$/fd; ulimit -c >/dev/null; umask; trap",
        None,
    );
    assert_eq!(
        outcome.stdout.lines().collect::<Vec<_>>(),
        [
            "LC_ALL=C",
            "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "0",
            "1",
            "2",
            "0022"
        ]
    );
}

#[test]
fn a_confined_command_has_no_capability_and_no_new_privileges_and_the_filter() {
    let outcome = run(
        "grep -E '^(Cap(Inh|Prm|Eff|Amb)|NoNewPrivs|Seccomp|SigBlk|SigIgn):' /proc/self/status; tty",
        Some(confinement(&[])),
    );
    for line in [
        "CapInh:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "CapAmb:\t0000000000000000",
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
        "SigBlk:\t0000000000000000",
        "SigIgn:\t0000000000000000",
        "not a tty",
    ] {
        assert!(outcome.stdout.contains(line), "{line} in {}", outcome.stdout);
    }
}

#[test]
fn a_failed_step_is_named_with_its_error() {
    let mut missing = plan("true", Some(confinement(&[])));
    missing.shell = "/no/bash".into();
    let mut workdir = plan("true", None);
    workdir.workdir = "/no/such".into();
    let mut big = plan(&format!("true {}", "x".repeat(200_000)), None);
    big.workdir = "/".into();
    let mut root = plan("true", Some(confinement(&[&PathBuf::from("/tmp")])));
    root.confinement.as_mut().unwrap().writable.push("/no/root".into());
    let mut required = plan("true", Some(confinement(&[])));
    required.confinement.as_mut().unwrap().network = Network::Loopback;
    required.confinement.as_mut().unwrap().require = vec![Guarantee::Network];
    let mut other = plan("true", None);
    other.build = "0".into();
    for (plan, step, errno) in [
        (missing, Step::Exec, 2),
        (workdir, Step::Workdir, 2),
        (big, Step::Exec, 7),
        (root, Step::BuildRuleset, 2),
        (required, Step::BuildRuleset, 0),
        (other, Step::ReceivePlan, 0),
    ] {
        let failure = Run::start(plan).finish().result.unwrap_err();
        assert_eq!((failure.step, failure.errno), (step, errno), "{}", failure.detail);
        assert!(!failure.detail.is_empty());
    }
}

#[test]
fn a_command_that_begins_with_a_dash_is_a_command() {
    assert_eq!(run("-x; echo $?", None).stdout, "127\n");
}

#[test]
fn termination_is_gentle_first_and_the_whole_tree_goes() {
    let mut run = Run::start(plan(
        "setsid sleep 1000 & (trap '' TERM; sleep 1001) & trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done",
        Some(confinement(&[])),
    ));
    run.wait_started();
    std::thread::sleep(Duration::from_millis(200));
    run.tell(&ToHelper::Terminate);
    let outcome = run.finish();
    assert_eq!((outcome.code(), outcome.stdout.as_str()), (0, "up\nbye\n"));
    assert!(outcome.report().terminated);
    assert_eq!(outcome.report().survivors, 0);
    assert!(outcome.elapsed < Duration::from_millis(1200), "{:?}", outcome.elapsed);
}

#[test]
fn what_outlives_the_shell_is_ended_after_the_drain_grace() {
    let outcome = run(
        "(setsid sh -c '(setsid sleep 1002 &) ; sleep 1002' &) ; kill -STOP $(sh -c 'sleep 1002 >&2 & echo $!') ; echo hi",
        Some(confinement(&[])),
    );
    assert_eq!(
        (outcome.code(), outcome.stdout.as_str(), outcome.report().survivors),
        (0, "hi\n", 0)
    );
    assert!(
        outcome.elapsed >= Duration::from_millis(250) && outcome.elapsed < Duration::from_millis(900),
        "{:?}",
        outcome.elapsed
    );
    let late = run("exec > >(sleep 0.1; cat); echo through", Some(confinement(&[])));
    assert_eq!(late.stdout, "through\n");
}

#[test]
fn a_fork_storm_ends() {
    let outcome = run(
        "f() { setsid bash -c \"$(declare -f f); sleep 0.02; f & f\" & }; ulimit -u 300 2>/dev/null; f; sleep 0.2",
        Some(confinement(&[])),
    );
    assert_eq!(outcome.report().survivors, 0);
    assert!(outcome.elapsed < Duration::from_secs(5), "{:?}", outcome.elapsed);
}

#[test]
fn without_a_daemon_nothing_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let tmp = folder.path().join("private");
    let mut plan = plan(
        "sleep 1003 & setsid sleep 1003 & sleep 1003",
        Some(confinement(&[folder.path()])),
    );
    plan.private_tmp = Some(tmp.clone().into());
    let mut run = Run::start(plan);
    let shell = run.wait_started();
    assert!(tmp.is_dir());
    let mut helper = std::mem::replace(&mut run.helper, std::process::Command::new("true").spawn().unwrap());
    drop(run);
    assert!(helper.wait().unwrap().code().is_some());
    assert!(!tmp.exists() && !PathBuf::from(format!("/proc/{shell}")).exists());
}

#[test]
fn the_private_folder_is_removed_whatever_is_in_it() {
    let folder = tempfile::tempdir().unwrap();
    let (tmp, outside) = (folder.path().join("p"), folder.path().join("outside"));
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("kept"), "x").unwrap();
    let mut plan = plan(
        "cd p && mkdir -p a/b/c && echo 1 > a/b/c/f && ln -s ../outside link && mkfifo pipe && d=$(printf 'd/%.0s' $(seq 150)) && mkdir -p $d && echo > $d/f && chmod 000 a/b a && stat -c %a .",
        Some(confinement(&[folder.path()])),
    );
    plan.workdir = folder.path().canonicalize().unwrap().into();
    plan.private_tmp = Some(folder.path().canonicalize().unwrap().join("p").into());
    let outcome = Run::start(plan).finish();
    assert_eq!(
        (outcome.code(), outcome.stdout.as_str()),
        (0, "700\n"),
        "{}",
        outcome.stderr
    );
    assert!(!tmp.exists());
    assert_eq!(std::fs::read_to_string(outside.join("kept")).unwrap(), "x");
}

/// The value of a line of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_default().trim_start_matches(':').trim().to_owned()
}

/// The child that a waiting helper has prepared.
fn prepared_child(run: &Run) -> u32 {
    let helper = run.helper.id();
    let children = format!("/proc/{helper}/task/{helper}/children");
    for _ in 0..500 {
        let text = std::fs::read_to_string(&children).unwrap();
        if let Ok(child) = text.trim().parse()
            && status(child, "Seccomp") == "2"
        {
            return child;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("a waiting helper prepares a child");
}

#[test]
fn a_waiting_helper_has_a_child_without_powers_that_becomes_the_command() {
    let mut run = Run::waiting(&helper(), &[]);
    let child = prepared_child(&run);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let bounding = set == "CapBnd" && !rustix::process::geteuid().is_root();
        assert!(
            bounding || status(child, set) == "0000000000000000",
            "{set}: {}",
            status(child, set)
        );
    }
    assert_eq!(status(child, "NoNewPrivs"), "1");
    // It does not hold the daemon's socket open.
    let first = std::fs::read_link(format!("/proc/{child}/fd/0")).unwrap();
    assert_eq!(first, PathBuf::from("/dev/null"));
    let folder = tempfile::tempdir().unwrap();
    let mut plan = plan(
        "echo $$ $NAME; pwd; umask; touch x; ls -l /proc/self/fd | wc -l; cat",
        Some(confinement(&[])),
    );
    plan.env.push(("NAME".into(), "value".into()));
    plan.workdir = folder.path().into();
    plan.umask = 0o027;
    run.deliver(plan);
    let outcome = run.finish();
    let expected = format!("{child} value\n{}\n0027\n", folder.path().display());
    assert!(outcome.stdout.starts_with(&expected), "{}", outcome.stdout);
    assert_eq!(outcome.facts().len(), 1, "{:?}", outcome.facts());
    assert!(!folder.path().join("x").exists());
}

#[test]
fn a_prepared_child_that_does_not_fit_is_replaced() {
    let mut sockets = confinement(&[]);
    sockets.network = Network::None;
    let mut large = plan("echo $$ ${#V9}", Some(confinement(&[])));
    for n in 0..12 {
        large.env.push((format!("V{n}").into(), "x".repeat(100_000).into()));
    }
    for (plan, expected) in [
        (plan("echo $$ full", None), "full"),
        (plan("echo $$ none", Some(sockets)), "none"),
        (large, "100000"),
    ] {
        let mut run = Run::waiting(&helper(), &[]);
        let child = prepared_child(&run);
        run.deliver(plan);
        let outcome = run.finish();
        let (pid, rest) = outcome.stdout.trim().split_once(' ').unwrap();
        assert_eq!(rest, expected);
        assert_ne!(pid, child.to_string(), "{expected}");
        assert_eq!(
            status(child, "State"),
            "",
            "{expected}: the child that was not needed is gone"
        );
    }
}

#[test]
fn a_helper_that_is_not_needed_takes_its_child_along() {
    let run = Run::waiting(&helper(), &[]);
    let child = prepared_child(&run);
    run.abandon();
    for _ in 0..200 {
        if status(child, "State").is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the prepared child lives on");
}
