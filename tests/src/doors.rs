//! The table of doors that other sandboxes were measured with: 51 things that must not work, 8 that must. Made for this product under its `strict` preset, the
//! 8 with the network setting `loopback`, as they need a server of their own.
use std::fmt::Write as _;
use std::fs;

use dsh_policy::SandboxMode::WorkspaceWrite;
use dsh_policy::mode::Tier;

use crate::outside::Outside;
use crate::{Ran, User, World};

/// What was measured of one row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Measured {
    /// What is tried, in the words of the table.
    pub name: &'static str,
    /// It must work, rather than be stopped.
    pub usable: bool,
    /// `DONE`, or the error.
    pub answer: String,
    /// Operation and call of the first fact.
    pub fact: Option<String>,
}

impl Measured {
    /// A door that is open, or a thing that must work and does not.
    #[must_use]
    pub fn is_bad(&self) -> bool {
        self.usable != (self.answer == "DONE")
    }

    /// A door that was stopped by nobody who says so.
    #[must_use]
    pub fn lacks_fact(&self) -> bool {
        !self.usable && self.fact.is_none()
    }
}

/// Name and probe. `W` is the workspace, `H` the home; the other words are those of [`Outside::fill`].
type Row = (&'static str, &'static [&'static str]);

const DOORS: &[Row] = &[
    ("write existing outside", &["open-wronly", "O/file"]),
    ("create outside", &["open-creat", "O/made"]),
    ("mkdir outside", &["mkdirat", "O/made"]),
    ("unlink outside", &["unlinkat", "O/file"]),
    ("symlink outside", &["symlinkat", "anywhere", "O/made"]),
    ("chmod outside", &["fchmodat", "O/file"]),
    ("utimes outside", &["utimensat", "O/file"]),
    ("setxattr outside", &["setxattr", "O/file"]),
    ("chown outside (no-op owner)", &["fchownat", "O/file"]),
    ("fchmod via O_RDONLY fd", &["fchmod-rdonly", "O/file"]),
    ("truncate outside", &["truncate", "O/file"]),
    ("open O_RDONLY+O_TRUNC outside", &["open-trunc-rdonly", "O/file"]),
    ("hardlink ws->outside", &["linkat", "W/file", "O/made"]),
    ("hardlink outside->ws, then write", &["linkat", "O/file", "W/made"]),
    ("rename ws->outside", &["renameat2", "W/file", "O/made"]),
    ("read ~/.ssh/id_rsa", &["open-rdonly", "H/.ssh/id_rsa"]),
    ("tcp connect loopback", &["tcp-connect", "TCP"]),
    ("tcp fastopen sendto loopback", &["tcp-fastopen", "TCP"]),
    ("mptcp connect loopback", &["mptcp-connect", "TCP"]),
    ("sctp socket", &["sctp-socket"]),
    ("udp send loopback", &["udp-send", "UDP"]),
    ("abstract unix connect", &["connect-abstract", "NAME"]),
    ("path unix connect outside", &["connect-unix", "O/stream"]),
    ("path unix dgram sendto outside", &["sendto-unix", "O/datagram"]),
    ("raw/netlink socket", &["netlink-generic"]),
    ("vsock socket", &["vsock-socket"]),
    ("kill outside (SIGUSR1)", &["kill-group", "VICTIM"]),
    ("sigqueue/pidfd_send_signal outside", &["pidfd-signal", "VICTIM"]),
    ("kill(-1,0) reaches others", &["kill-all-zero"]),
    ("ptrace attach outside", &["ptrace-attach", "VICTIM"]),
    ("process_vm_readv outside", &["vm-read", "VICTIM", "ADDRESS"]),
    ("pidfd_getfd outside", &["pidfd-getfd", "VICTIM"]),
    ("read /proc/PID/environ", &["open-rdonly", "/proc/VICTIM/environ"]),
    ("read /proc/PID/cmdline", &["open-rdonly", "/proc/VICTIM/cmdline"]),
    ("prlimit64 SET on outside pid", &["prlimit-set", "VICTIM"]),
    ("setpriority outside", &["setpriority", "VICTIM"]),
    ("sched_setaffinity outside", &["affinity", "VICTIM"]),
    ("ioprio_set outside", &["ioprio-set", "VICTIM"]),
    (
        "write /proc/PID/oom_score_adj",
        &["open-wronly", "/proc/VICTIM/oom_score_adj"],
    ),
    ("sysv shm (shared with outside)", &["shmat", "SHM"]),
    ("mq/posix: msgget outside", &["msgsnd", "MSG"]),
    ("mount in nested userns", &["unshare-user-mount"]),
    ("io_uring_setup", &["io-uring"]),
    ("nested unshare(NEWUSER)", &["unshare-user"]),
    ("keyctl/add_key", &["add-key"]),
    ("bpf(2)", &["bpf"]),
    ("perf_event_open", &["perf"]),
    ("userfaultfd", &["userfaultfd"]),
    (
        ".git/hooks/pre-commit write",
        &["open-creat", "W/repo/.git/hooks/pre-commit"],
    ),
    (".git/config write", &["open-wronly", "W/repo/.git/config"]),
    ("rename .git away", &["renameat2", "W/repo/.git", "W/repo/away"]),
];

const USES: &[Row] = &[
    ("unix socketpair (usability)", &["unix-pair"]),
    ("own tcp server+client (usability)", &["tcp-serve"]),
    ("ptrace own child (usability)", &["ptrace-traceme"]),
    ("write /dev/null (usability)", &["open-wronly", "/dev/null"]),
    ("open /dev/ptmx + grantpt (usability)", &["terminal-pair"]),
    (
        "shm_open /dev/shm (usability)",
        &["open-creat", "/dev/shm/dsh-test-VICTIM"],
    ),
    ("write /tmp (usability)", &["open-creat", "/tmp/dsh-test-VICTIM"]),
    (
        "rename across ws dirs (usability)",
        &["renameat2", "W/dir/inner", "W/other/inner"],
    ),
];

/// Measures every row as `user` in `tier`.
#[must_use]
pub fn measure(user: User, tier: Tier) -> Vec<Measured> {
    let mut rows = measure_with(user, tier, "none", DOORS, false);
    rows.extend(measure_with(user, tier, "loopback", USES, true));
    rows
}

/// The tiers that this host and this version offer, best first; only the one that `DSH_TEST_TIER` names when it is set.
#[must_use]
pub fn tiers(user: User) -> Vec<Tier> {
    let world = World::new(user);
    let output = world
        .dsh_exec(&["doctor", "--json"].map(std::ffi::OsStr::new))
        .output()
        .unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("doctor gives JSON");
    let wanted = crate::world::tier();
    let all = report["report"]["tiers"]
        .as_array()
        .or_else(|| report["tiers"].as_array())
        .expect("a list of tiers");
    let usable = all
        .iter()
        .filter(|entry| entry["usable"] == true && entry["tier"].as_str().is_some());
    usable
        .filter(|entry| wanted.is_none_or(|wanted| entry["tier"] == wanted.as_str()))
        .map(|entry| serde_json::from_value(entry["tier"].clone()).unwrap())
        .collect()
}

fn measure_with(user: User, tier: Tier, network: &str, rows: &[Row], usable: bool) -> Vec<Measured> {
    let mut world = World::without_daemon(user, "");
    let config = strict(&world, tier, network);
    world.write(&world.config_file(), config.as_bytes());
    lay(&world);
    world.start_daemon();
    let outside = Outside::new(&world);
    let mut measured = Vec::new();
    for (name, probe) in rows {
        let words: Vec<String> = probe.iter().map(|word| fill(&world, &outside, word)).collect();
        let ran = world.run(WorkspaceWrite, world.probe(&words));
        let report = ran.result().sandbox.confined.expect("the command was confined");
        assert_eq!(report.tier, tier);
        measured.push(Measured {
            name,
            usable,
            answer: answer(&ran),
            fact: report
                .denials
                .first()
                .map(|fact| format!("{} ({})", fact.operation, fact.syscall)),
        });
    }
    measured
}

/// The `strict` preset, with the tier that is asked for.
fn strict(world: &World, tier: Tier, network: &str) -> String {
    let arguments = ["config", "init", "--print", "--preset", "strict"].map(std::ffi::OsStr::new);
    let output = world.dsh_exec(&arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut config = String::from_utf8(output.stdout).unwrap();
    if network != "none" {
        // In some tiers the loopback is the host's, so that this one guarantee cannot be demanded.
        config = config
            .replace("network = \"none\"", &format!("network = \"{network}\""))
            .replace("\"network\", ", "");
    }
    let lines: Vec<_> = config.lines().filter(|line| !line.starts_with("tiers")).collect();
    format!("tiers = [\"{tier}\"]\n{}\n", lines.join("\n"))
}

fn lay(world: &World) {
    let (home, workspace) = (world.home(), world.workspace());
    for folder in [home.join(".ssh"), workspace.join("dir"), workspace.join("other")] {
        fs::create_dir(&folder).unwrap();
        world.user.own(&folder);
    }
    for file in [
        home.join(".ssh/id_rsa"),
        workspace.join("file"),
        workspace.join("dir/inner"),
    ] {
        world.write(&file, b"content\n");
    }
    let made = world.command("git").args(["init", "-q", "repo"]).output().expect("git");
    assert!(made.status.success(), "{made:?}");
}

fn fill(world: &World, outside: &Outside, word: &str) -> String {
    let place = |root: std::path::PathBuf, rest: &str| root.join(rest).to_str().unwrap().to_owned();
    match word.split_once('/') {
        Some(("W", rest)) => place(world.workspace(), rest),
        Some(("H", rest)) => place(world.home(), rest),
        _ => outside.fill(word),
    }
}

fn answer(ran: &Ran) -> String {
    match ran.text().as_str() {
        "OK" => "DONE".to_owned(),
        other => other.to_owned(),
    }
}

/// The table as a page. `columns` are tiers or users with their rows, all in the same order.
#[must_use]
pub fn page(columns: &[(String, Vec<Measured>)]) -> String {
    let mut page = String::from(
        "# Doors\n\n\
         Generated by `DSH_WRITE_DOORS=1 cargo test -p dsh-tests --test doors`, never edited; a test keeps it equal to what is measured.\n\n\
         Each row is one thing that a confined command tries, as root and as an ordinary user, under the `strict` preset in `workspace-write`, against objects of the same\n\
         user outside the workspace. `DONE` means that it worked. The first 51 rows are doors: `DONE` is bad, and a refusal must be a fact. What does not exist\n\
         for the command (`ESRCH`, `ENOENT`, `EINVAL`, `ECONNREFUSED` in the `namespace` tier) is not refused by anybody, and is no fact. The 8 rows marked *(usability)*\n\
         must work; they are run with the network setting `loopback`. In the `landlock` tier there is no `/tmp` of the\n\
         command's own under that name, and `strict` closes the shared one: there it is `$TMPDIR` that can be written.\n\n",
    );
    let names: Vec<_> = columns.iter().map(|(name, _)| name.as_str()).collect();
    let _ = writeln!(
        page,
        "| probe | {} | fact |\n|---|{}---|",
        names.join(" | "),
        "---|".repeat(names.len())
    );
    let Some((_, first)) = columns.first() else { return page };
    for (index, row) in first.iter().enumerate() {
        let answers: Vec<_> = columns.iter().map(|(_, rows)| rows[index].answer.as_str()).collect();
        let facts: Vec<_> = columns
            .iter()
            .filter_map(|(_, rows)| rows[index].fact.as_deref())
            .collect();
        let _ = writeln!(
            page,
            "| {} | {} | {} |",
            row.name,
            answers.join(" | "),
            facts.first().unwrap_or(&"-")
        );
    }
    let count = |test: &dyn Fn(&Measured) -> bool| -> String {
        let counts: Vec<_> = columns
            .iter()
            .map(|(_, rows)| rows.iter().filter(|row| test(row)).count().to_string())
            .collect();
        counts.join(" | ")
    };
    let _ = writeln!(
        page,
        "\n| | {} |\n|---|{}",
        names.join(" | "),
        "---|".repeat(names.len())
    );
    let _ = writeln!(
        page,
        "| doors open, of {} | {} |",
        DOORS.len(),
        count(&|row| !row.usable && row.is_bad())
    );
    let _ = writeln!(
        page,
        "| usability rows broken, of {} | {} |",
        USES.len(),
        count(&|row| row.usable && row.is_bad())
    );
    let _ = writeln!(
        page,
        "| stopped doors without a fact | {} |",
        count(&Measured::lacks_fact)
    );
    page
}
