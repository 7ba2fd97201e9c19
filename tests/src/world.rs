//! One user's folders, daemon and command line.
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use dsh_policy::mode::Tier;
use dsh_policy::{BashRunResult, DenialFact, SandboxMode};

use crate::{binaries, process};

/// Who a world belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The superuser.
    Root,
    /// Somebody without any right beyond their own files.
    Ordinary,
}

/// An id that no package uses, so that no file of the machine belongs to it.
const ORDINARY_ID: u32 = 47_011;

/// Every user this process can act as: both when it is root, otherwise only itself.
#[must_use]
pub fn users() -> Vec<User> {
    if rustix::process::geteuid().is_root() {
        vec![User::Root, User::Ordinary]
    } else {
        vec![User::Ordinary]
    }
}

impl User {
    /// The user and group id.
    #[must_use]
    pub fn id(self) -> u32 {
        match self {
            Self::Root => 0,
            Self::Ordinary if rustix::process::geteuid().is_root() => ORDINARY_ID,
            Self::Ordinary => rustix::process::geteuid().as_raw(),
        }
    }

    /// Makes `command` run as this user, without other groups.
    pub fn apply(self, command: &mut Command) {
        if rustix::process::geteuid().is_root() {
            command.uid(self.id()).gid(self.id());
        }
    }

    /// Gives a file (not what a link points to) to this user.
    pub fn own(self, path: &Path) {
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(path, Some(self.id()), Some(self.id())).expect("root can give files away");
        }
    }
}

/// The tier that every daemon of this run is narrowed to; none for the best one of this machine.
#[must_use]
pub fn tier() -> Option<Tier> {
    let name = std::env::var("DSH_TEST_TIER").ok().filter(|name| !name.is_empty())?;
    let tier = Tier::ALL.iter().find(|tier| tier.as_str() == name);
    Some(*tier.unwrap_or_else(|| panic!("DSH_TEST_TIER: there is no tier {name:?}")))
}

/// The configuration of a run that is narrowed to one tier, unless it names tiers itself.
fn with_tier(toml: &str) -> String {
    match tier() {
        Some(tier) if !toml.contains("tiers =") => format!("tiers = [\"{tier}\"]\n{toml}"),
        _ => toml.to_owned(),
    }
}

/// A user's folders with a running daemon. Everything ends and goes when it is dropped.
pub struct World {
    /// Who it belongs to.
    pub user: User,
    folder: PathBuf,
    daemon: Option<Child>,
    _guard: tempfile::TempDir,
}

impl World {
    /// A world with a running daemon in its default configuration.
    #[must_use]
    pub fn new(user: User) -> Self {
        Self::with_config(user, "")
    }

    /// A world whose daemon runs with this configuration.
    #[must_use]
    pub fn with_config(user: User, toml: &str) -> Self {
        let mut world = Self::without_daemon(user, toml);
        world.start_daemon();
        world
    }

    /// A world without a daemon: folders, binaries and configuration only.
    #[must_use]
    pub fn without_daemon(user: User, toml: &str) -> Self {
        // Not below /tmp: that is writable in workspace-write, and `outside` must not be.
        let guard = tempfile::Builder::new()
            .prefix("dsh-test-")
            .tempdir_in("/var/tmp")
            .expect("a folder in /var/tmp");
        let folder = guard.path().to_owned();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        for name in [
            "home",
            "workspace",
            "outside",
            "run",
            "state",
            "config",
            "config/dsh-execd",
            "bin",
        ] {
            let path = folder.join(name);
            fs::create_dir(&path).unwrap();
            let private = matches!(name, "run" | "state" | "config");
            fs::set_permissions(&path, fs::Permissions::from_mode(if private { 0o700 } else { 0o755 })).unwrap();
            user.own(&path);
        }
        for name in binaries::NAMES {
            let (from, to) = (binaries::directory().join(name), folder.join("bin").join(name));
            // A copy when the build is on another file system; a link is quicker.
            if fs::hard_link(&from, &to).is_err() {
                fs::copy(&from, &to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
            }
        }
        let world = Self {
            user,
            folder,
            daemon: None,
            _guard: guard,
        };
        let config = world.config_file();
        fs::write(&config, with_tier(toml)).unwrap();
        user.own(&config);
        world
    }

    /// The folder of everything.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
    /// The user's home.
    #[must_use]
    pub fn home(&self) -> PathBuf {
        self.folder.join("home")
    }
    /// The workspace of commands.
    #[must_use]
    pub fn workspace(&self) -> PathBuf {
        self.folder.join("workspace")
    }
    /// A folder of the user's that is neither the workspace nor `/tmp`.
    #[must_use]
    pub fn outside(&self) -> PathBuf {
        self.folder.join("outside")
    }
    /// The daemon's state folder.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.folder.join("state/dsh-execd")
    }
    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.join("run/dsh-execd/socket")
    }
    /// The daemon's configuration.
    #[must_use]
    pub fn config_file(&self) -> PathBuf {
        self.folder.join("config/dsh-execd/config.toml")
    }
    /// One of the binaries.
    #[must_use]
    pub fn binary(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }
    /// Where the daemon's standard error goes.
    #[must_use]
    pub fn log_file(&self) -> PathBuf {
        self.folder.join("daemon.stderr")
    }
    /// Process id of the daemon.
    #[must_use]
    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon was started").id()
    }

    /// A command with this user's ids and environment and nothing else.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        self.user.apply(&mut command);
        command.env_clear().current_dir(self.workspace()).stdin(Stdio::null());
        for (name, value) in self.environment() {
            command.env(name, value);
        }
        command
    }

    /// The user's environment.
    #[must_use]
    pub fn environment(&self) -> BTreeMap<&'static str, OsString> {
        BTreeMap::from([
            ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".into()),
            ("HOME", self.home().into_os_string()),
            ("LANG", "C.UTF-8".into()),
            ("XDG_RUNTIME_DIR", self.folder.join("run").into_os_string()),
            ("XDG_STATE_HOME", self.folder.join("state").into_os_string()),
            ("XDG_CONFIG_HOME", self.folder.join("config").into_os_string()),
        ])
    }

    /// Starts the daemon and waits until it listens.
    pub fn start_daemon(&mut self) {
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_file())
            .unwrap();
        let mut command = self.command(self.binary("dsh-execd"));
        let mut child = command
            .current_dir("/")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the daemon starts");
        let deadline = Instant::now() + Duration::from_secs(10);
        while UnixStream::connect(self.socket()).is_err() {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the daemon ended at once with {status}: {}", self.log());
            }
            assert!(
                Instant::now() < deadline,
                "the daemon does not listen on {}: {}",
                self.socket().display(),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        self.daemon = Some(child);
    }

    /// What the daemon wrote to its standard error.
    #[must_use]
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_file()).unwrap_or_default()).into_owned()
    }

    /// Sends the daemon a signal.
    pub fn signal_daemon(&self, signal: rustix::process::Signal) {
        process::signal(self.daemon_pid(), signal);
    }

    /// Waits for the daemon to end by itself or by a signal already sent.
    pub fn wait_for_daemon(&mut self) -> std::process::ExitStatus {
        self.daemon.take().expect("a daemon was started").wait().unwrap()
    }

    /// `dsh-exec` with this user's surroundings.
    #[must_use]
    pub fn dsh_exec(&self, arguments: &[&OsStr]) -> Command {
        let mut command = self.command(self.binary("dsh-exec"));
        command.args(arguments);
        command
    }

    /// `dsh-exec run --json` of `command` in this mode, with the world's workspace.
    #[must_use]
    pub fn run(&self, mode: SandboxMode, command: impl AsRef<OsStr>) -> Ran {
        self.run_with(mode, &[], command)
    }

    /// The same with further options.
    #[must_use]
    pub fn run_with(&self, mode: SandboxMode, options: &[&OsStr], command: impl AsRef<OsStr>) -> Ran {
        let mut process = self.json_command(mode, options, command);
        let begun = Instant::now();
        let output = process.output().expect("dsh-exec runs");
        Ran::new(output, begun.elapsed())
    }

    /// The command of [`World::run_with`], not run yet.
    #[must_use]
    pub fn json_command(&self, mode: SandboxMode, options: &[&OsStr], command: impl AsRef<OsStr>) -> Command {
        let mut process = self.dsh_exec(&[
            "run".as_ref(),
            "--mode".as_ref(),
            mode.as_str().as_ref(),
            "--workspace".as_ref(),
        ]);
        process
            .arg(self.workspace())
            .arg("--socket")
            .arg(self.socket())
            .arg("--json")
            .args(options)
            .arg("--")
            .arg(command);
        process
    }

    /// The command line of a probe, quoted for the shell.
    #[must_use]
    pub fn probe(&self, arguments: &[String]) -> String {
        let words =
            std::iter::once(self.binary("dsh-probe").to_string_lossy().into_owned()).chain(arguments.iter().cloned());
        format!(
            "exec {}",
            words.map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" ")
        )
    }

    /// An executable of the user's that is owned by them, with this content.
    pub fn write(&self, path: &Path, content: &[u8]) {
        fs::write(path, content).unwrap();
        if rustix::process::geteuid().is_root() {
            chown(path, Some(self.user.id()), Some(self.user.id())).unwrap();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            process::signal(daemon.id(), rustix::process::Signal::TERM);
            let deadline = Instant::now() + Duration::from_secs(8);
            while daemon.try_wait().ok().flatten().is_none() {
                if Instant::now() > deadline {
                    let _ = daemon.kill();
                    let _ = daemon.wait();
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        // Detached tasks outlive their daemon, but not the world. A keeper's process id counts only while it is the keeper.
        for entry in fs::read_dir(self.state().join("detached"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let pid = fs::read_to_string(entry.path().join("keeper"))
                .ok()
                .and_then(|pid| pid.parse().ok());
            if let Some(pid) = pid
                && process::command_line(pid).contains(&*entry.path().to_string_lossy())
            {
                process::signal(pid, rustix::process::Signal::KILL);
            }
        }
    }
}

/// One finished `dsh-exec run --json`.
#[derive(Debug)]
pub struct Ran {
    /// The command line's own exit.
    pub status: std::process::ExitStatus,
    /// Its standard output, raw.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: String,
    /// How long it took.
    pub elapsed: Duration,
}

impl Ran {
    fn new(output: Output, elapsed: Duration) -> Self {
        Self {
            status: output.status,
            stdout: output.stdout,
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            elapsed,
        }
    }

    /// From a finished process.
    #[must_use]
    pub fn of(output: Output) -> Self {
        Self::new(output, Duration::ZERO)
    }

    /// Its exit code; a signal is 128+n as a shell says it.
    #[must_use]
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// Whether it ran in namespaces of its own.
    #[must_use]
    pub fn apart(&self) -> bool {
        let confined = self.result().sandbox.confined;
        confined.is_some_and(|confined| confined.tier != Tier::Landlock)
    }

    /// The result object as plain JSON.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| {
            panic!(
                "no JSON ({error}): {:?}, stderr {:?}, {}",
                String::from_utf8_lossy(&self.stdout),
                self.stderr,
                self.status
            )
        })
    }

    /// The result object.
    #[must_use]
    pub fn result(&self) -> BashRunResult {
        serde_json::from_value(self.json()).unwrap_or_else(|error| panic!("no result ({error}): {:?}", self.json()))
    }

    /// The facts, which must have been observed.
    #[must_use]
    pub fn facts(&self) -> Vec<DenialFact> {
        let confined = self.result().sandbox.confined.expect("the command was confined");
        assert!(
            confined.observed,
            "refusals were not observed: {:?}",
            confined.unobserved_reason
        );
        assert_eq!(confined.denials_dropped, 0);
        confined.denials
    }

    /// Standard output of the command, without the line end.
    #[must_use]
    pub fn text(&self) -> String {
        self.result().stdout.text.trim_end_matches('\n').to_owned()
    }
}
