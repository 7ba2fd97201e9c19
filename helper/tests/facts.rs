//! What is refused is refused with the right error, is a fact, and changes nothing; what fails by itself is no fact; what is allowed just works.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod support;

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use support::{Run, confinement, plan, run};

struct Place {
    _folder: tempfile::TempDir,
    workspace: PathBuf,
    outside: PathBuf,
}

/// A workspace and a folder outside of it with one file `f` and one folder `d` in each, owned by whoever runs the command.
fn place(owner: u32) -> Place {
    let folder = tempfile::Builder::new().prefix("facts").tempdir_in("/var/tmp").unwrap();
    let base = folder.path().canonicalize().unwrap();
    let place = Place {
        workspace: base.join("w"),
        outside: base.join("o"),
        _folder: folder,
    };
    std::fs::set_permissions(&base, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for side in [&place.workspace, &place.outside] {
        std::fs::create_dir(side).unwrap();
        std::fs::create_dir(side.join("d")).unwrap();
        std::fs::write(side.join("f"), "content").unwrap();
        for path in [side.clone(), side.join("d"), side.join("f")] {
            std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
        }
    }
    place
}

/// Everything that a change could show in.
fn snapshot(folder: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(path) = todo.pop() {
        let stat = path.symlink_metadata().unwrap();
        let content = if stat.is_file() {
            std::fs::read(&path).unwrap_or_default()
        } else {
            vec![]
        };
        lines.push(format!(
            "{path:?} {:o} {} {} {} {} {content:?}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.nlink(),
            stat.mtime_nsec()
        ));
        if stat.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
    }
    lines.sort();
    lines
}

/// A one-line Python program that makes one call and prints the name of its error, or `ok`.
fn python(call: &str) -> String {
    format!(
        "python3 -c \"\nimport os,errno,ctypes,sys\nO='{{O}}';W='{{W}}'\ntry:\n  {call}\n  print('ok')\nexcept OSError as e: print(errno.errorcode[e.errno])\n\""
    )
}

const CALLS: &[(&str, &str, &str)] = &[
    (
        "os.open(O+'/f',os.O_WRONLY)",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "os.open(O+'/f',os.O_RDWR|os.O_APPEND)",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "os.open(O+'/f',os.O_RDONLY|os.O_TRUNC)",
        "EACCES",
        "truncate openat {O}/f EACCES",
    ),
    (
        "os.open(O+'/new',os.O_WRONLY|os.O_CREAT)",
        "EACCES",
        "create-file openat {O}/new EACCES",
    ),
    (
        "os.open(O,os.O_WRONLY|os.O_TMPFILE)",
        "EACCES",
        "create-file openat {O} EACCES",
    ),
    ("os.truncate(O+'/f',0)", "EACCES", "truncate truncate {O}/f EACCES"),
    ("os.mkdir(O+'/new')", "EACCES", "make-dir mkdir {O}/new EACCES"),
    ("os.unlink(O+'/f')", "EACCES", "remove-file unlink {O}/f EACCES"),
    ("os.rmdir(O+'/d')", "EACCES", "remove-dir rmdir {O}/d EACCES"),
    ("os.rename(O+'/f',O+'/g')", "EACCES", "rename rename {O}/f EACCES"),
    ("os.rename(W+'/f',O+'/g')", "EACCES", "rename rename {W}/f EACCES"),
    ("os.rename(O+'/f',W+'/g')", "EACCES", "rename rename {O}/f EACCES"),
    ("os.link(O+'/f',W+'/g')", "EXDEV", "link link {O}/f EXDEV"),
    ("os.link(W+'/f',O+'/g')", "EXDEV", "link link {W}/f EXDEV"),
    ("os.symlink('x',O+'/l')", "EACCES", "symlink symlink {O}/l EACCES"),
    ("os.mkfifo(O+'/p')", "EACCES", "make-node mknodat {O}/p EACCES"),
    ("os.chmod(O+'/f',0o600)", "EPERM", "change-mode chmod {O}/f EPERM"),
    (
        "os.fchmod(os.open(O+'/f',os.O_RDONLY),0o600)",
        "EPERM",
        "change-mode fchmod {O}/f EPERM",
    ),
    (
        "os.chown(O+'/f',-1,os.getgid())",
        "EPERM",
        "change-owner chown {O}/f EPERM",
    ),
    ("os.utime(O+'/f')", "EPERM", "change-times utimensat {O}/f EPERM"),
    ("os.utime(O+'/f',(1,2))", "EPERM", "change-times utimensat {O}/f EPERM"),
    (
        "os.setxattr(O+'/f','user.x',b'1')",
        "EPERM",
        "change-xattr setxattr {O}/f EPERM",
    ),
    (
        "os.symlink(O+'/f',W+'/to');os.open(W+'/to',os.O_WRONLY)",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "os.symlink(O+'/fresh',W+'/to2');os.open(W+'/to2',os.O_WRONLY|os.O_CREAT)",
        "EACCES",
        "create-file openat {O}/fresh EACCES",
    ),
    (
        "os.open('/proc/self/fd/%d'%os.open(O+'/f',os.O_RDONLY),os.O_WRONLY)",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "os.chmod('/proc/self/fd/%d'%os.open(O+'/f',os.O_RDONLY),0o600)",
        "EPERM",
        "change-mode chmod {O}/f EPERM",
    ),
    (
        "os.open('f',os.O_WRONLY,dir_fd=os.open(O,os.O_RDONLY))",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "os.chdir(O+'/d');os.unlink('../f')",
        "EACCES",
        "remove-file unlink {O}/f EACCES",
    ),
    (
        "os.open(W+'/../o/f',os.O_WRONLY)",
        "EACCES",
        "write-file openat {O}/f EACCES",
    ),
    (
        "import fcntl;fcntl.ioctl(os.open(O+'/f',os.O_RDONLY),0x40086602,b'\\0'*8)",
        "EPERM",
        "change-flags ioctl {O}/f EPERM",
    ),
    (
        "import socket;socket.socket(socket.AF_UNIX).bind(O+'/s')",
        "EACCES",
        "make-node bind {O}/s EACCES",
    ),
];

fn check_calls(owner: u32, prefix: &[&str]) {
    let (_folder, program) = support::helper_for_everybody();
    for (call, errno, fact) in CALLS {
        for read_only in [false, true] {
            let place = place(owner);
            let fill = |text: &str| {
                text.replace("{O}", place.outside.to_str().unwrap())
                    .replace("{W}", place.workspace.to_str().unwrap())
            };
            let before = snapshot(&place.outside);
            if read_only && call.contains("W+'") {
                continue; // Would be refused earlier.
            }
            let roots: &[&Path] = if read_only { &[] } else { &[&place.workspace] };
            let mut run = Run::waiting(&program, prefix);
            run.deliver(plan(&fill(&python(call)), Some(confinement(roots))));
            let outcome = run.finish();
            assert_eq!(outcome.stdout.trim(), *errno, "{call}: {}", outcome.stderr);
            let rule = if read_only {
                "read-only-mode"
            } else {
                "outside-writable-roots"
            };
            assert_eq!(outcome.lines(), [format!("{} {rule}", fill(fact))], "{call}");
            let f = &outcome.facts()[0];
            assert!(f.executable.as_ref().unwrap().display().contains("python3") && f.count == 1);
            assert_eq!(snapshot(&place.outside), before, "{call}");
        }
    }
}

#[test]
fn every_kind_of_change_outside_is_refused_and_is_a_fact() {
    check_calls(rustix::process::geteuid().as_raw(), &["env"]);
}

#[test]
fn the_same_for_an_ordinary_user() {
    if !rustix::process::geteuid().is_root() {
        return check_calls(rustix::process::geteuid().as_raw(), &["env"]);
    }
    check_calls(65534, support::as_ordinary_user());
}

#[test]
fn inside_a_writable_root_the_kernel_s_own_results_come_back_and_nothing_is_a_fact() {
    let place = place(rustix::process::geteuid().as_raw());
    let script = "set -e; cd $W; echo a > new; echo b >> f; : > f; mkdir x x/y; rmdir x/y; mv new x/; ln f g; ln -s f s; mkfifo p; rm p; \
        chmod 751 f; touch -d @5.25 f; stat -c '%a %.9Y' f; chmod u+s f; stat -c %a f; touch -h -d @7 s; stat -c %Y s; install -m 755 f i; cp -p f c; stat -c '%a %Y' c; \
        python3 -c 'import os; os.setxattr(\"f\",\"user.a\",b\"v\"*3000); assert os.getxattr(\"f\",\"user.a\")==b\"v\"*3000; os.removexattr(\"f\",\"user.a\"); assert os.listxattr(\"f\")==[]; \
r,w=os.pipe(); os.fchmod(r,0o600); m=os.memfd_create(\"m\"); os.fchmod(m,0o600); os.open(\"/proc/self/fd/%d\"%m,os.O_RDWR); os.utime(\"f\"); os.open(\".\",os.O_TMPFILE|os.O_RDWR); f=os.open(\"q\",os.O_CREAT|os.O_RDWR); os.unlink(\"q\"); os.fchmod(f,0o600); os.fchown(f,-1,-1)'; \
        echo x > /dev/null; echo y > /dev/stdout; echo z > /dev/fd/1; tar cf t.tar x; mkdir u; tar xpf t.tar -C u; sed -i s/a/b/ x/new; cat u/x/new x/new; \
        test -w f; ! test -w $O/f; ! test -w /etc; chmod 600 missing || true; echo hi > /proc/self/comm; echo 5 > /proc/$$/oom_score_adj; cat <(echo sub) 2>&1";
    let outcome = run(
        &script
            .replace("$W", place.workspace.to_str().unwrap())
            .replace("$O", place.outside.to_str().unwrap()),
        Some(confinement(&[&place.workspace])),
    );
    assert_eq!(
        outcome.stdout, "751 5.250000000\n4751\n7\n4751 5\ny\nz\na\nb\nsub\n",
        "{}",
        outcome.stderr
    );
    assert_eq!((outcome.code(), outcome.lines()), (0, vec![]), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("No such file"), "{}", outcome.stderr);
}

#[test]
fn what_fails_by_itself_is_no_fact() {
    let place = place(rustix::process::geteuid().as_raw());
    let script = "cd $O; rm -f none; rmdir d/none; mkdir d; mkdir -p d; rmdir f; rm d; mv none x; echo > d; echo > none/x; ln none y; ln -s f d; chmod 600 none; touch -c none; \
        rmdir /; rmdir .; cat none; mknod z c 1 3; true > f/x; mv -T d f; ln f d/../f; exit 3";
    let outcome = run(
        &script.replace("$O", place.outside.to_str().unwrap()),
        Some(confinement(&[&place.workspace])),
    );
    // `ln -s f d` is the one that would work: `d/f`; and making a device is a privilege that the sandbox took away.
    let lines = outcome.lines();
    assert!(
        lines
            .iter()
            .all(|line| line.starts_with("symlink ") || line.starts_with("make-node ")),
        "{lines:?}"
    );
    assert_eq!(outcome.code(), 3);
}

#[test]
fn an_ordinary_user_s_permission_errors_are_no_facts() {
    let (_folder, program) = support::helper_for_everybody();
    let mut run = Run::waiting(&program, support::as_ordinary_user());
    let place = place(0);
    run.deliver(plan(&format!("cd {0}; echo > f; rm f; chmod 600 f; mkdir n; touch f; echo x > /etc/passwd; mkdir /etc/zz; chown 0 f; kill -9 1; unshare -m true; exit 4", place.outside.display()), Some(confinement(&[]))));
    let outcome = run.finish();
    assert_eq!((outcome.lines(), outcome.code()), (vec![], 4), "{}", outcome.stderr);
}

#[test]
fn repeats_are_counted_and_a_storm_is_bounded() {
    let place = place(rustix::process::geteuid().as_raw());
    let mut plan = plan(
        &format!(
            "cd {}; for i in 1 2 3; do : > f; done; for i in $(seq 50); do : > n$i; done; true",
            place.outside.display()
        ),
        Some(confinement(&[])),
    );
    plan.max_denials = 10;
    let outcome = Run::start(plan).finish();
    let report = outcome.report();
    assert_eq!(
        (report.denials.len(), report.denials_dropped, report.denials[0].count),
        (10, 41, 3)
    );
    assert_eq!(outcome.code(), 0);
}
