//! Plays the daemon: starts the real helper, gives it a plan, collects everything it says and the command's output.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsh_policy::DenialFact;
use dsh_policy::codec;
use dsh_policy::frame::{self, Decoder, FRAME_LIMIT};
use dsh_policy::mode::{Lifetime, Network, SandboxMode, Tier};
use dsh_policy::plan::{BUILD_ID, Confinement, ExitStatus, Failure, FromHelper, Plan, Report, ToHelper};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// A plan to start from.
pub(crate) fn plan(command: &str, confinement: Option<Confinement>) -> Plan {
    Plan {
        terminal: false,
        build: BUILD_ID.to_owned(),
        shell: "/bin/bash".into(),
        command: command.into(),
        env: vec![
            ("PATH".into(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".into()),
            ("LC_ALL".into(), "C".into()),
        ],
        workdir: "/".into(),
        umask: 0o022,
        confinement,
        private_tmp: None,
        kill_grace_ms: 400,
        drain_grace_ms: 250,
        setup_deadline_ms: 10_000,
        max_denials: 1000,
        lifetime: Lifetime::Foreground,
    }
}

/// A confinement of the landlock tier with these writable roots.
pub(crate) fn confinement(writable: &[&Path]) -> Confinement {
    Confinement {
        mode: if writable.is_empty() {
            SandboxMode::ReadOnly
        } else {
            SandboxMode::WorkspaceWrite
        },
        tier: Tier::Landlock,
        writable: writable
            .iter()
            .map(|path| path.canonicalize().unwrap().into())
            .collect(),
        devices: ["null", "zero", "full", "random", "urandom", "tty"]
            .iter()
            .map(|d| format!("/dev/{d}").into())
            .collect(),
        protect: vec![],
        protect_git: false,
        deny_read: vec![],
        allow_unix_socket: vec![],
        network: Network::Full,
        require: vec![],
        private_tmp_root: None,
    }
}

/// A helper with its plan delivered.
pub(crate) struct Run {
    pub(crate) helper: Child,
    socket: UnixStream,
    decoder: Decoder,
    output: Option<[JoinHandle<Vec<u8>>; 2]>,
    pub(crate) events: Vec<FromHelper>,
    pub(crate) began: Instant,
}

/// Everything that came of one plan.
pub(crate) struct Outcome {
    pub(crate) events: Vec<FromHelper>,
    pub(crate) result: Result<Report, Failure>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    pub(crate) elapsed: Duration,
}

/// The helper, also for another user: cargo's folder may not be readable by everybody.
pub(crate) fn helper() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_dsh-exec-helper"))
}

/// What starts a program as an ordinary user.
pub(crate) fn as_ordinary_user() -> &'static [&'static str] {
    if rustix::process::geteuid().is_root() {
        &[
            "setpriv",
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "--",
        ]
    } else {
        &["env"]
    }
}

/// Copies an executable by another process: while this one holds it open for writing, a fork of another test's thread does so too, and it cannot be
/// executed (ETXTBSY).
pub(crate) fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status().unwrap();
    assert!(copied.success());
}

/// A copy of the helper that every user can execute.
pub(crate) fn helper_for_everybody() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::Builder::new()
        .prefix("helper")
        .tempdir_in("/var/tmp")
        .unwrap();
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = folder.path().join("dsh-exec-helper");
    copy_program(&helper(), &program);
    (folder, program)
}

impl Run {
    pub(crate) fn start(plan: Plan) -> Self {
        let mut run = Self::waiting(&helper(), &[]);
        run.deliver(plan);
        run
    }

    /// A helper started through `prefix` (for instance another user's), ready but without a plan.
    pub(crate) fn waiting(program: &Path, prefix: &[&str]) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut words: Vec<std::ffi::OsString> = prefix.iter().map(Into::into).collect();
        words.push(program.into());
        let helper = Command::new(&words[0])
            .args(&words[1..])
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut run = Self {
            helper,
            socket: ours,
            decoder: Decoder::new(FRAME_LIMIT),
            output: None,
            events: Vec::new(),
            began: Instant::now(),
        };
        assert_eq!(
            run.next(),
            Some(FromHelper::Ready {
                build: BUILD_ID.to_owned()
            })
        );
        run
    }

    pub(crate) fn deliver(&mut self, plan: Plan) {
        let (out_read, out_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (err_read, err_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let null = File::open("/dev/null").unwrap();
        let bytes = frame::encode(&codec::to_binary(&ToHelper::Run(Box::new(plan))).unwrap()).unwrap();
        let fds = [null.as_fd(), out_write.as_fd(), err_write.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        self.began = Instant::now();
        let mut sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
        while sent < bytes.len() {
            sent += rustix::io::write(&self.socket, &bytes[sent..]).unwrap();
        }
        let reader = |fd: OwnedFd| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                File::from(fd).read_to_end(&mut text).unwrap();
                text
            })
        };
        self.output = Some([reader(out_read), reader(err_read)]);
    }

    pub(crate) fn tell(&self, message: &ToHelper) {
        let bytes = frame::encode(&codec::to_binary(message).unwrap()).unwrap();
        assert_eq!(rustix::io::write(&self.socket, &bytes).unwrap(), bytes.len());
    }

    /// The next message; none when the helper closed its end.
    pub(crate) fn next(&mut self) -> Option<FromHelper> {
        loop {
            if let Some(payload) = self.decoder.next_payload().unwrap() {
                let message: FromHelper = codec::from_binary(&payload).unwrap();
                self.events.push(message.clone());
                return Some(message);
            }
            let mut buffer = [0; 65536];
            match self.socket.read(&mut buffer) {
                Ok(0) | Err(_) => return None,
                Ok(length) => self.decoder.push(&buffer[..length]),
            }
        }
    }

    pub(crate) fn wait_started(&mut self) -> u32 {
        loop {
            match self.next() {
                Some(FromHelper::Started { pid, .. }) => return pid,
                Some(_) => {}
                None => panic!("never started: {:?}", self.events),
            }
        }
    }

    /// Waits for the helper after its last message.
    pub(crate) fn finish_quietly(mut self) {
        self.helper.wait().unwrap();
        for thread in self.output.take().unwrap() {
            thread.join().unwrap();
        }
    }

    /// Closes the daemon's end.
    pub(crate) fn abandon(self) {
        let Self { mut helper, socket, .. } = self;
        drop(socket);
        helper.wait().unwrap();
    }

    pub(crate) fn finish(mut self) -> Outcome {
        let mut result = None;
        while let Some(message) = self.next() {
            match message {
                FromHelper::Finished(report) => result = Some(Ok(*report)),
                FromHelper::Failed(failure) => result = Some(Err(failure)),
                _ => {}
            }
        }
        let elapsed = self.began.elapsed();
        self.helper.wait().unwrap();
        let text = |thread: JoinHandle<Vec<u8>>| String::from_utf8_lossy(&thread.join().unwrap()).into_owned();
        let [stdout, stderr] = self.output.take().expect("a plan was delivered").map(text);
        Outcome {
            result: result.unwrap_or_else(|| panic!("no final message: {:?}", self.events)),
            events: self.events,
            stdout,
            stderr,
            elapsed,
        }
    }
}

impl Outcome {
    pub(crate) fn report(&self) -> &Report {
        self.result
            .as_ref()
            .unwrap_or_else(|failure| panic!("failed: {failure:?}"))
    }
    pub(crate) fn code(&self) -> i32 {
        match self.report().status {
            ExitStatus::Code(code) => code,
            ExitStatus::Signal(signal) => panic!("signal {signal}; {}", self.stderr),
        }
    }
    pub(crate) fn facts(&self) -> &[DenialFact] {
        &self.report().denials
    }
    /// Facts as `operation syscall path errno rule`.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.facts()
            .iter()
            .map(|f| {
                let path = f.path.as_ref().map(|p| p.display()).unwrap_or_default();
                format!("{} {} {path} {} {}", f.operation, f.syscall, f.errno, f.rule)
            })
            .collect()
    }
}

/// Runs `command` to its end.
pub(crate) fn run(command: &str, confinement: Option<Confinement>) -> Outcome {
    Run::start(plan(command, confinement)).finish()
}
