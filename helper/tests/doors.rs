//! Doors besides plain file calls: other processes, sockets, kernel interfaces, protected and hidden paths, races, and a sandbox inside a sandbox.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod support;

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use dsh_policy::mode::{Guarantee, Network};
use dsh_policy::plan::{Confinement, FromHelper};
use support::{Outcome, Run, confinement, copy_program, helper, plan, run};

fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::Builder::new().prefix("doors").tempdir_in("/var/tmp").unwrap();
    let path = folder.path().canonicalize().unwrap();
    (folder, path)
}

/// Runs Python that prints one line per step.
fn python(program: &str, confinement: Confinement) -> Outcome {
    let prelude = "import ctypes,errno,os,socket,signal,sys\nlibc=ctypes.CDLL(None,use_errno=True)\ndef call(*a):\n  ctypes.set_errno(0)\n  r=libc.syscall(*a)\n  print('ok' if r>=0 else errno.errorcode[ctypes.get_errno()])\ndef t(f):\n  try:\n    f();print('ok')\n  except OSError as e: print(errno.errorcode[e.errno])\n";
    let command = format!("exec python3 - <<'PROGRAM'\n{prelude}{program}\nPROGRAM");
    run(&command, Some(confinement))
}

fn summaries(outcome: &Outcome) -> Vec<String> {
    outcome
        .facts()
        .iter()
        .map(|f| {
            format!(
                "{} {} {} {}",
                f.operation,
                f.syscall,
                f.errno,
                f.detail.clone().unwrap_or_default()
            )
        })
        .collect()
}

#[test]
fn closed_kernel_interfaces_are_refused_with_one_fact_each() {
    let outcome = python(
        "call(272,0x10000000)\ncall(425,1,0)\ncall(323,0)\ncall(29,0,4096,0o600)\ncall(250,0,0)\ncall(165,0,0,0,0,0)\ncall(435,0,0)\ncall(437,0,0,0,0)\ncall(0x40000000+39)",
        confinement(&[]),
    );
    assert_eq!(
        outcome.stdout.split_whitespace().collect::<Vec<_>>(),
        [
            "EPERM", "ENOSYS", "ENOSYS", "ENOSYS", "ENOSYS", "EPERM", "ENOSYS", "ENOSYS", "ENOSYS"
        ],
        "{}",
        outcome.stderr
    );
    let mut expected = vec![
        "namespace unshare EPERM CLONE_NEWUSER",
        "kernel-interface io_uring_setup ENOSYS ",
        "kernel-interface userfaultfd ENOSYS ",
        "ipc shmget ENOSYS ",
        "ipc keyctl ENOSYS ",
    ];
    if rustix::process::geteuid().is_root() {
        expected.push("mount mount EPERM ");
    }
    assert_eq!(summaries(&outcome), expected);
}

#[test]
fn processes_outside_are_out_of_reach_and_own_ones_are_not() {
    let own = std::process::id();
    let program = format!(
        "o={own}\nt(lambda:os.kill(o,0))\nt(lambda:os.kill(o,signal.SIGCONT))\nt(lambda:os.setpriority(os.PRIO_PROCESS,o,5))\nt(lambda:os.sched_setaffinity(o,[0]))\n\
         import resource\nt(lambda:resource.prlimit(o,resource.RLIMIT_CORE,(0,0)))\ncall(101,16,o,0,0)\nfd=os.pidfd_open(o)\ncall(424,fd,18,0,0)\n\
         c=os.fork()\nif c==0:\n  signal.pause()\nt(lambda:os.setpriority(os.PRIO_PROCESS,c,5))\nt(lambda:resource.prlimit(c,resource.RLIMIT_CORE,(0,0)))\nt(lambda:os.kill(c,15))\nos.waitpid(c,0)\nt(lambda:os.kill(os.getpid(),0))\nt(lambda:os.kill(0,0))"
    );
    let outcome = python(&program, confinement(&[]));
    let words: Vec<_> = outcome.stdout.split_whitespace().collect();
    assert_eq!(
        words,
        [
            "EPERM", "EPERM", "EPERM", "EPERM", "EPERM", "EPERM", "EPERM", "ok", "ok", "ok", "ok", "ok"
        ],
        "{}",
        outcome.stderr
    );
    let calls: Vec<_> = outcome.facts().iter().map(|f| f.syscall.as_str()).collect();
    assert_eq!(
        calls,
        [
            "kill",
            "setpriority",
            "sched_setaffinity",
            "prlimit64",
            "ptrace",
            "pidfd_send_signal"
        ]
    );
}

#[test]
fn without_a_network_only_unix_sockets_can_be_made() {
    let program = "for a in [(2,1,0),(10,2,0),(2,1,262),(17,3,0),(1,1,0),(16,3,0)]:\n  t(lambda:socket.socket(*a))\nsocket.socketpair();socket.if_nameindex();print('pair')";
    let outcome = python(
        program,
        Confinement {
            network: Network::None,
            ..confinement(&[])
        },
    );
    assert_eq!(
        outcome.stdout.split_whitespace().collect::<Vec<_>>(),
        ["EACCES", "EACCES", "EACCES", "EACCES", "ok", "ok", "pair"],
        "{}",
        outcome.stderr
    );
    assert_eq!(
        summaries(&outcome),
        [
            "create-socket socket EACCES AF_INET SOCK_STREAM",
            "create-socket socket EACCES AF_INET6 SOCK_DGRAM",
            "create-socket socket EACCES AF_INET SOCK_STREAM IPPROTO_MPTCP",
            "create-socket socket EACCES AF_PACKET SOCK_RAW"
        ]
    );
}

#[test]
fn a_socket_of_the_host_is_refused_by_path_and_an_own_one_works() {
    let ((_a, workspace), (_b, outside)) = (folder(), folder());
    let host = outside.join("host.sock");
    let _listener = UnixListener::bind(&host).unwrap();
    std::os::unix::fs::symlink(&host, workspace.join("link.sock")).unwrap();
    let program = format!(
        "h='{}';w='{}'\nt(lambda:socket.socket(socket.AF_UNIX).connect(h))\nt(lambda:socket.socket(socket.AF_UNIX).connect(w+'/link.sock'))\nt(lambda:socket.socket(socket.AF_UNIX,socket.SOCK_DGRAM).sendto(b'x',h))\n\
         s=socket.socket(socket.AF_UNIX);s.bind(w+'/own');s.listen()\nt(lambda:socket.socket(socket.AF_UNIX).connect(w+'/own'))\nt(lambda:socket.socket(socket.AF_UNIX).connect(w+'/none'))",
        host.display(),
        workspace.display()
    );
    let outcome = python(&program, confinement(&[&workspace]));
    assert_eq!(
        outcome.stdout.split_whitespace().collect::<Vec<_>>(),
        ["EACCES", "EACCES", "EACCES", "ok", "ENOENT"],
        "{}",
        outcome.stderr
    );
    let expected: Vec<String> = ["connect", "sendto"]
        .iter()
        .map(|call| format!("connect-unix {call} {} EACCES unix-socket", host.display()))
        .collect();
    assert_eq!(outcome.lines(), expected);
    assert_eq!(outcome.facts()[0].count, 2);
}

#[test]
fn git_metadata_of_a_repository_that_was_there_is_protected_and_git_itself_works() {
    let (_folder, workspace) = folder();
    let prepare = format!(
        "cd {} && git init -q old && cd old && git -c user.name=a -c user.email=b commit -q --allow-empty -m x",
        workspace.display()
    );
    assert!(
        std::process::Command::new("bash")
            .args(["-c", &prepare])
            .status()
            .unwrap()
            .success()
    );
    let mut confinement = confinement(&[&workspace]);
    confinement.protect_git = true;
    let script = "cd $W/old; echo a > .git/hooks/pre-commit; git config core.fsmonitor x; mv .git .g; mv .git/hooks h; rm -rf .git/config; chmod +x .git/config; ln -s .git g; echo x >> g/config; \
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=b; set -e; echo 1 > f; git add f; git commit -q -m f; git checkout -q -b y; git gc -q; git init -q ../new; cd ../new; git config a.b c; echo > .git/hooks/x; git commit -q --allow-empty -m n; git log --oneline | wc -l";
    let mut plan = plan(&script.replace("$W", workspace.to_str().unwrap()), Some(confinement));
    plan.env.push(("HOME".into(), "/nonexistent".into()));
    let before = std::fs::read(workspace.join("old/.git/config")).unwrap();
    let outcome = Run::start(plan).finish();
    assert_eq!(
        (outcome.code(), outcome.stdout.as_str()),
        (0, "1\n"),
        "{} {:?}",
        outcome.stderr,
        outcome.lines()
    );
    assert_eq!(std::fs::read(workspace.join("old/.git/config")).unwrap(), before);
    assert!(!workspace.join("old/.git/hooks/pre-commit").exists() && workspace.join("old/.git/hooks").is_dir());
    assert!(
        outcome.facts().len() >= 7 && outcome.facts().iter().all(|f| f.rule.as_str() == "protected-path"),
        "{:?}",
        outcome.lines()
    );
}

#[test]
fn hidden_paths_cannot_be_read_and_say_so() {
    let ((_a, workspace), (_b, hidden)) = (folder(), folder());
    std::fs::write(hidden.join("key"), "secret").unwrap();
    let mut confinement = confinement(&[&workspace]);
    confinement.deny_read = vec![hidden.clone().into()];
    let outcome = run(
        &format!(
            "cd {w}; ln -s {h}/key k; cat {h}/key; cat k; ls {h}; cat {h}/none; cat /etc/hostname >/dev/null && echo fine > ok; cat ok",
            w = workspace.display(),
            h = hidden.display()
        ),
        Some(confinement),
    );
    assert_eq!(outcome.stdout, "fine\n");
    let key = format!("read-file openat {}/key EACCES deny-read", hidden.display());
    let mut lines = outcome.lines();
    lines.dedup();
    assert_eq!(
        lines,
        [
            key.clone(),
            key,
            format!("read-file openat {} EACCES deny-read", hidden.display())
        ]
        .into_iter()
        .collect::<Vec<_>>()
        .into_iter()
        .fold(Vec::<String>::new(), |mut all, line| {
            if all.last() != Some(&line) {
                all.push(line);
            }
            all
        })
    );
}

#[test]
fn a_program_that_races_with_itself_changes_nothing_outside() {
    let ((_a, workspace), (_b, outside)) = (folder(), folder());
    let victim = outside.join("victim");
    std::fs::write(&victim, "whole").unwrap();
    std::fs::write(workspace.join("own__"), "x").unwrap();
    let before = victim.metadata().unwrap();
    let source = workspace.join("race.c");
    std::fs::write(
        &source,
        r#"#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
static volatile char path[512]; static const char *in, *out; static volatile int stop;
static void *flip(void *x) { while (!stop) { strcpy((char *)path, in); strcpy((char *)path, out); } return x; }
int main(int argc, char **argv) { in = argv[1]; out = argv[2]; strcpy((char *)path, in); pthread_t t; pthread_create(&t, 0, flip, 0);
  for (int i = 0; i < 6000; i++) { const char *p = (const char *)path; struct timespec ts[2] = {{1, 1}, {1, 1}};
    int fd = open(p, O_WRONLY | O_APPEND); if (fd >= 0) { write(fd, "y", 1); close(fd); }
    chmod(p, 0777); utimensat(AT_FDCWD, p, ts, 0); setxattr(p, "user.r", "1", 1, 0); truncate(p, 3); chown(p, -1, getgid()); }
  stop = 1; pthread_join(t, 0); return 0; }"#,
    )
    .unwrap();
    let binary = workspace.join("race");
    assert!(
        std::process::Command::new("gcc")
            .args(["-O1", "-w", "-pthread", "-o"])
            .arg(&binary)
            .arg(&source)
            .status()
            .unwrap()
            .success()
    );
    let outcome = run(
        &format!(
            "{} {} {}; echo $?",
            binary.display(),
            workspace.join("own__").display(),
            victim.display()
        ),
        Some(confinement(&[&workspace])),
    );
    assert_eq!(outcome.stdout, "0\n");
    let after = victim.metadata().unwrap();
    use std::os::unix::fs::MetadataExt as _;
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "whole");
    assert_eq!(
        (after.mode(), after.ctime(), after.ctime_nsec(), after.mtime_nsec()),
        (before.mode(), before.ctime(), before.ctime_nsec(), before.mtime_nsec())
    );
    for fact in outcome.facts() {
        let path = fact.path.as_ref().unwrap().to_path_buf();
        assert!(!path.starts_with(&workspace), "no false fact about {path:?}");
    }
    assert!(
        outcome
            .facts()
            .iter()
            .any(|fact| fact.path.as_ref().unwrap().as_path() == victim && fact.count > 100)
    );
}

#[test]
fn inside_another_sandbox_it_still_confines_and_says_that_it_cannot_observe() {
    let (_folder, workspace) = folder();
    copy_program(&helper(), &workspace.join("inner"));
    let outcome = run(
        &format!("{}/inner --probe", workspace.display()),
        Some(confinement(&[&workspace, Path::new("/tmp")])),
    );
    assert!(
        outcome.stdout.contains(r#""seccompNotify":false"#),
        "{}",
        outcome.stdout
    );
    assert!(
        outcome.stdout.contains(r#"{"tier":"landlock","usable":true"#),
        "{}",
        outcome.stdout
    );
    assert!(outcome.stdout.contains(r#""guarantee":"facts""#), "{}", outcome.stdout);
}

#[test]
fn the_start_says_what_is_not_enforced() {
    let mut guarded = confinement(&[Path::new("/tmp")]);
    guarded.protect_git = true;
    guarded.network = Network::Loopback;
    let outcome = run("true", Some(guarded));
    let FromHelper::Started {
        unenforced, unobserved, ..
    } = &outcome.events[1]
    else {
        panic!("{:?}", outcome.events)
    };
    let names: Vec<_> = unenforced.iter().map(|entry| entry.guarantee).collect();
    assert_eq!(names, [Guarantee::ProtectedPaths, Guarantee::Network]);
    assert_eq!(*unobserved, None);
}
