//! `dsh-exec run` between a person, a pipe and a command: interrupts, readers that do not read, disks that are full.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::ffi::OsStr;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use dsh_policy::SandboxMode;
use dsh_tests::process::{signal, wait_until};
use dsh_tests::{World, users};
use rustix::process::Signal;

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn an_interrupt_ends_the_command_and_is_exit_code_130() {
    for user in users() {
        let world = World::new(user);
        let mark = dsh_tests::process::unique_mark("interrupt");
        let mut command = world.dsh_exec(&["run", "--env", mark.as_str(), "--socket"].map(OsStr::new));
        command
            .arg(world.socket())
            .args(["--", "echo up; sleep 1000"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        signal(child.id(), Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert!(wait_until(Duration::from_secs(1), || dsh_tests::process::marked(&mark).is_empty()));
    }
}

#[test]
fn an_interrupt_is_heard_while_nobody_reads_the_output() {
    for user in users() {
        let world = World::new(user);
        let mark = dsh_tests::process::unique_mark("blocked");
        let mut command = world.dsh_exec(&["run", "--env", mark.as_str(), "--socket"].map(OsStr::new));
        command
            .arg(world.socket())
            .args(["--", "yes"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        // Nothing is read: the pipe fills, and then the client can only wait.
        let wchan = format!("/proc/{}/syscall", child.id());
        assert!(wait_until(Duration::from_secs(5), || {
            std::thread::sleep(Duration::from_millis(100));
            fs::read_to_string(&wchan).is_ok_and(|call| call != "running\n")
        }));
        std::thread::sleep(Duration::from_millis(300));
        signal(child.id(), Signal::INT);
        let ended = || fs::read_to_string(format!("/proc/{}/stat", child.id())).is_ok_and(|stat| stat.contains(") Z "));
        assert!(
            wait_until(Duration::from_secs(8), ended),
            "{user:?}: the client waits for its reader"
        );
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{user:?}");
        assert!(
            String::from_utf8_lossy(&output.stderr).contains("came faster than they could be shown"),
            "{user:?} {output:?}"
        );
        assert!(wait_until(Duration::from_secs(1), || dsh_tests::process::marked(&mark).is_empty()));
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_and_a_reader_that_left_is_none() {
    let world = World::new(users()[0]);
    let full = || fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for arguments in [
        &["run", "--", "echo out"][..],
        &["run", "--json", "--", "echo out"],
        &["run", "--render", "--", "echo out"],
        &["status"],
        &["config", "show"],
    ] {
        let command = || {
            let mut command = world.dsh_exec(&["--socket".as_ref(), world.socket().as_os_str()]);
            command.args(arguments);
            command
        };
        let output = command().stdout(full()).output().unwrap();
        let told = (output.status.code(), text(&output.stderr));
        let expected = "dsh-exec: cannot write to standard output: No space left on device (os error 28)\n";
        assert_eq!(told, (Some(125), expected.to_owned()), "{arguments:?}");

        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = command().stdout(writer).output().unwrap();
        assert_eq!(
            (output.status.code(), text(&output.stderr)),
            (Some(141), String::new()),
            "{arguments:?}"
        );
    }
}

#[test]
fn an_interrupt_is_heard_while_the_command_does_not_read_its_input() {
    for user in users() {
        let world = World::new(user);
        let mark = dsh_tests::process::unique_mark("input");
        let file = world.home().join("input");
        world.write(&file, &vec![b'x'; 16 * 1024 * 1024]);
        let mut command = world.dsh_exec(&["run", "--env", mark.as_str(), "--stdin"].map(OsStr::new));
        command
            .arg(&file)
            .arg("--socket")
            .arg(world.socket())
            .args(["--", "echo up; sleep 1000"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut up = [0; 3];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut up).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        signal(child.id(), Signal::INT);
        assert_eq!(child.wait().unwrap().code(), Some(130), "{user:?}");
        assert!(wait_until(Duration::from_secs(1), || dsh_tests::process::marked(&mark).is_empty()));
        let options = [OsStr::new("--stdin"), file.as_os_str()];
        assert_eq!(
            world.run_with(SandboxMode::ReadOnly, &options, "wc -c").text(),
            "16777216"
        );
    }
}
