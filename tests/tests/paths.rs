//! Working directories and workspaces with odd names, links and places.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use dsh_policy::SandboxMode::WorkspaceWrite;
use dsh_tests::{Ran, World, users};

fn run_in(world: &World, workspace: &Path, workdir: Option<&OsStr>, command: &str) -> Ran {
    let mut process = world.dsh_exec(&["run", "--mode", "workspace-write", "--json", "--socket"].map(OsStr::new));
    process.arg(world.socket()).arg("--workspace").arg(workspace);
    if let Some(workdir) = workdir {
        process.arg("--workdir").arg(workdir);
    }
    Ran::of(process.arg("--").arg(command).output().unwrap())
}

fn made(world: &World, name: &[u8]) -> PathBuf {
    let path = world.home().join(OsStr::from_bytes(name));
    fs::create_dir_all(&path).unwrap();
    world.user.own(&path);
    path
}

#[test]
fn a_workspace_may_have_any_name() {
    let long = [
        vec![b'n'; 255],
        vec![b'/'],
        vec![b'm'; 255],
        vec![b'/'],
        vec![b'o'; 255],
    ]
    .concat();
    let names: &[&[u8]] = &[
        b"plain",
        b"with spaces ",
        b"line\nbreak",
        b"-dash",
        b"quote'\"$x`y`\\",
        b"not-utf8-\xff\xfe",
        "grün-日本".as_bytes(),
        b"*?[a]",
        b"a:b=c,d",
        &long,
    ];
    for user in users() {
        let world = World::new(user);
        for name in names {
            let workspace = made(&world, name);
            let mut parent = workspace.parent().unwrap();
            while parent != world.home() {
                user.own(parent);
                parent = parent.parent().unwrap();
            }
            let what = format!("{user:?} {}", workspace.display());
            let ran = run_in(&world, &workspace, None, "pwd -P > here; echo x > ../outside-of-it");
            let here = fs::read(workspace.join("here")).unwrap_or_else(|error| panic!("{what}: {error}: {ran:?}"));
            assert_eq!(
                OsString::from_vec(here[..here.len() - 1].to_vec()),
                workspace.as_os_str(),
                "{what}"
            );
            let facts = ran.facts();
            assert_eq!(facts.len(), 1, "{what}: {facts:#?}");
            assert_eq!(
                facts[0].path.as_ref().unwrap().to_path_buf(),
                workspace.parent().unwrap().join("outside-of-it")
            );
        }
    }
}

#[test]
fn links_are_followed_as_the_file_system_does_and_only_once() {
    for user in users() {
        let world = World::new(user);
        let target = made(&world, b"target/inner");
        user.own(target.parent().unwrap());
        let link = world.home().join("link");
        symlink(&target, &link).unwrap();
        let ran = run_in(&world, &link, None, "pwd -P; touch a");
        assert_eq!((ran.text(), ran.facts()), (target.display().to_string(), vec![]));
        assert!(target.join("a").exists());
        // `link/..` is the parent of the target, not of the link.
        let ran = run_in(&world, &link.join(".."), None, "pwd -P; touch b");
        assert_eq!(
            (ran.text(), ran.facts()),
            (target.parent().unwrap().display().to_string(), vec![])
        );
        assert!(target.parent().unwrap().join("b").exists());
        // A link inside the workspace that leads out does not widen it.
        let workspace = made(&world, b"narrow");
        symlink(world.outside(), workspace.join("out")).unwrap();
        let ran = run_in(&world, &workspace, Some(OsStr::new("out")), "pwd -P; touch c");
        assert_eq!(ran.text(), world.outside().display().to_string());
        assert_eq!(ran.facts().len(), 1);
        assert!(!world.outside().join("c").exists());
    }
}

#[test]
fn a_relative_working_directory_is_below_the_workspace() {
    for user in users() {
        let world = World::new(user);
        let sub = made(&world, b"ws/sub dir");
        user.own(sub.parent().unwrap());
        let ran = run_in(&world, sub.parent().unwrap(), Some(OsStr::new("sub dir")), "pwd -P");
        assert_eq!(ran.text(), sub.display().to_string());
        let ran = run_in(
            &world,
            sub.parent().unwrap(),
            Some(world.outside().as_os_str()),
            "pwd -P; touch x",
        );
        assert_eq!(ran.text(), world.outside().display().to_string());
        assert_eq!(ran.facts().len(), 1, "the working directory is not the workspace");
    }
}

#[test]
fn a_working_directory_that_cannot_be_used_is_an_error_that_names_it() {
    for user in users() {
        let world = World::new(user);
        let file = world.workspace().join("file");
        world.write(&file, b"");
        for (workdir, reason) in [("missing", "not found"), ("file", "not a directory")] {
            let ran = world.run_with(WorkspaceWrite, &["--workdir", workdir].map(OsStr::new), "touch ran");
            assert_eq!((ran.code(), ran.stdout.len()), (125, 0), "{workdir} {ran:?}");
            let path = world.workspace().join(workdir);
            let expected = format!("dsh-exec: cannot use working directory {}: ", path.display());
            assert!(ran.stderr.starts_with(&expected), "{:?}", ran.stderr);
            assert!(ran.stderr.to_lowercase().contains(reason), "{:?}", ran.stderr);
            assert_eq!(ran.stderr.lines().count(), 1);
        }
        assert!(!world.workspace().join("ran").exists());
    }
}

#[test]
fn the_writable_places_of_workspace_write_are_these_and_no_others() {
    for user in users() {
        let world = World::new(user);
        let extra = made(&world, b"extra");
        let name = format!("dsh-place-{}-{}", std::process::id(), user.id());
        let script = format!(
            "for d in . /tmp /dev/shm $TMPDIR '{}' '{}' \"$HOME\" /var/tmp /run /; do \
             if (echo x > $d/{name}) 2> /dev/null; then echo yes $d; rm $d/{name}; else echo no $d; fi; done",
            extra.display(),
            world.outside().display()
        );
        let ran = world.run_with(WorkspaceWrite, &[OsStr::new("--writable"), extra.as_os_str()], &script);
        let text = ran.text();
        let can = |place: &str| text.lines().any(|line| line == format!("yes {place}"));
        for place in [".", "/tmp", "/dev/shm", extra.to_str().unwrap()] {
            assert!(can(place), "{user:?} {place}: {text}");
        }
        assert!(
            text.lines().any(|line| line.starts_with("yes /tmp/dsh-")),
            "the private TMPDIR: {text}"
        );
        for place in [
            world.outside().to_str().unwrap(),
            world.home().to_str().unwrap(),
            "/var/tmp",
            "/run",
            "/",
        ] {
            assert!(
                text.lines().any(|line| line == format!("no {place}")),
                "{user:?} {place}: {text}"
            );
        }
    }
}

#[test]
fn a_writable_path_that_does_not_exist_is_an_error_and_nothing_runs() {
    let world = World::new(users()[0]);
    let ran = world.run_with(
        WorkspaceWrite,
        &["--writable", "/nowhere/at/all"].map(OsStr::new),
        "touch ran",
    );
    assert_eq!(ran.code(), 125);
    assert!(ran.stderr.contains("/nowhere/at/all"), "{:?}", ran.stderr);
    assert!(!world.workspace().join("ran").exists());
}

#[test]
fn the_caller_s_mask_applies_to_new_files() {
    use std::os::unix::fs::PermissionsExt;
    for user in users() {
        let world = World::new(user);
        for (mask, mode) in [("027", 0o640), ("077", 0o600), ("000", 0o666)] {
            let ran = world.run_with(
                WorkspaceWrite,
                &["--umask", mask].map(OsStr::new),
                format!("touch m{mask}; umask"),
            );
            assert_eq!(ran.text(), format!("0{mask}"));
            let found = fs::metadata(world.workspace().join(format!("m{mask}")))
                .unwrap()
                .permissions()
                .mode()
                & 0o777;
            assert_eq!(found, mode, "{mask}");
        }
    }
}
