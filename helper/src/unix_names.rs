//! To whom an abstract socket name belongs: to a process of the command, to somebody else, to nobody.
use rustix::fs::{CWD, Dir, Mode, OFlags, openat, readlink};

use crate::tree;

/// Whose socket has a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// There is no such socket.
    Nobody,
    /// Every socket with that name is held by a process below the helper.
    Command,
    /// Some socket with that name is not, or it could not be found out.
    Other,
}

/// `accepts connections` in the flags of the kernel's list.
const LISTENING: u32 = 0x10000;

/// The owner of an abstract name, in the thread's network namespace. With `listening` only sockets that accept connections count.
pub(crate) fn owner(thread: i32, name: &[u8], listening: bool) -> Owner {
    let list = tree::read(&tree::proc_path(thread, "net/unix"));
    if list.is_empty() {
        return Owner::Other;
    }
    let inodes = inodes(&list, name, listening);
    if inodes.is_empty() {
        return Owner::Nobody;
    }
    let processes = tree::descendants();
    let own = |inode: &&[u8]| {
        let link = [b"socket:[", *inode, b"]"].concat();
        processes.iter().any(|pid| holds(*pid, &link))
    };
    // A name of one's own could be made to look like another's in the list, so all that look alike must be one's own.
    if inodes.iter().all(own) {
        Owner::Command
    } else {
        Owner::Other
    }
}

/// The name as the kernel lists it.
fn listed(name: &[u8]) -> Vec<u8> {
    let visible = |byte: &u8| if *byte == 0 { b'@' } else { *byte };
    name.iter().map(visible).collect()
}

/// The name for people.
pub(crate) fn printable(name: &[u8]) -> String {
    String::from_utf8_lossy(&listed(name)).into_owned()
}

fn inodes<'a>(list: &'a [u8], name: &[u8], listening: bool) -> Vec<&'a [u8]> {
    let wanted = listed(name);
    list.split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let mut words = line.splitn(7, |byte| *byte == b' ');
            let flags = words.nth(3)?;
            let rest = words.nth(2)?;
            let (inode, path) = rest
                .trim_ascii_start()
                .split_at_checked(rest.trim_ascii_start().iter().position(|byte| *byte == b' ')?)?;
            let flags = u32::from_str_radix(std::str::from_utf8(flags).ok()?, 16).ok()?;
            let counts = !listening || flags & LISTENING != 0;
            (counts && path.get(1..)? == wanted).then_some(inode)
        })
        .collect()
}

fn holds(pid: i32, link: &[u8]) -> bool {
    let folder = format!("/proc/{pid}/fd");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Some(entries) = openat(CWD, &folder, flags, Mode::empty()).and_then(Dir::new).ok() else {
        return false;
    };
    entries.flatten().any(|entry| {
        let Ok(fd) = entry.file_name().to_str() else {
            return false;
        };
        readlink(format!("{folder}/{fd}"), Vec::new()).is_ok_and(|name| name.as_bytes() == link)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
        0000000000000000: 00000002 00000000 00010000 0001 01 12345 @own\n\
        0000000000000000: 00000002 00000000 00000000 0002 01   777 @own@x\n\
        0000000000000000: 00000003 00000000 00000000 0001 03 99\n\
        0000000000000000: 00000002 00000000 00010000 0001 01 42 /run/own\n";

    #[test]
    fn names_are_found_whole_and_only_where_they_count() {
        assert_eq!(inodes(LIST, b"\0own", true), [b"12345"]);
        assert_eq!(inodes(LIST, b"\0own\0x", false), [b"777"]);
        assert!(inodes(LIST, b"\0own\0x", true).is_empty());
        assert!(inodes(LIST, b"\0ow", false).is_empty());
        assert!(inodes(LIST, b"\0run/own", false).is_empty());
    }
}
