//! Which pseudo terminals are the command's own (those whose other end one of its processes holds), and typing into any of them.
use dsh_policy::denial::{Operation, Rule};
use rustix::fs::{CWD, Dir, Mode, OFlags, openat, readlink};
use rustix::io::Errno;

use crate::calls::TERMINAL_INJECTION;
use crate::facts::Refusal;
use crate::mediate::{Decision, Parked};
use crate::tree;

/// Whether the call types into a terminal on behalf of its user.
pub(crate) fn is_injection(parked: &Parked<'_>) -> bool {
    parked.call.number == libc::SYS_ioctl && TERMINAL_INJECTION.contains(&parked.bits(1))
}

/// Refused on every terminal, also on the command's own: what is typed would look like the user's. On anything else it fails by itself.
pub(crate) fn judge_injection(parked: &Parked<'_>) -> Decision {
    let Some(name) = parked.view.descriptor_name(parked.int(0)) else {
        return Decision::fail(Errno::BADF);
    };
    let is_terminal = [
        &b"/dev/pts/"[..],
        b"/dev/tty",
        b"/dev/console",
        b"/dev/ptmx",
        b"/dev/vc/",
    ]
    .iter()
    .any(|prefix| name.starts_with(prefix));
    if !is_terminal {
        return Decision::fail(Errno::NOTTY);
    }
    let command = if parked.bits(1) == TERMINAL_INJECTION[0] {
        "TIOCSTI"
    } else {
        "TIOCLINUX"
    };
    let mut refusal = Refusal::of(Operation::TerminalInput, Rule::Confined, Some(command.to_owned()));
    refusal.path = Some(name);
    Decision::Refuse(refusal)
}

/// Whether `path` is the terminal end of a pair that a process below the helper made. Landlock knows no such thing: all terminals lie in one folder.
pub(crate) fn is_own(path: &[u8]) -> bool {
    let number = path.strip_prefix(b"/dev/pts/");
    let number = number.filter(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit));
    number.is_some_and(|number| tree::descendants().into_iter().any(|pid| holds_master(pid, number)))
}

fn holds_master(pid: i32, number: &[u8]) -> bool {
    let folder = format!("/proc/{pid}/fd");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Some(entries) = openat(CWD, &folder, flags, Mode::empty()).and_then(Dir::new).ok() else {
        return false;
    };
    entries.flatten().any(|entry| {
        let Ok(fd) = entry.file_name().to_str() else {
            return false;
        };
        let link = readlink(format!("{folder}/{fd}"), Vec::new());
        link.is_ok_and(|name| name.as_bytes().ends_with(b"/ptmx")) && master_number(pid, fd) == number
    })
}

/// `tty-index` of a master's `fdinfo` is the number of its terminal.
fn master_number(pid: i32, fd: &str) -> Vec<u8> {
    let text = tree::read_start(&format!("/proc/{pid}/fdinfo/{fd}"), 512);
    let line = text
        .split(|byte| *byte == b'\n')
        .find_map(|line| line.strip_prefix(b"tty-index:"));
    line.map(<[u8]>::trim_ascii).unwrap_or_default().to_vec()
}
