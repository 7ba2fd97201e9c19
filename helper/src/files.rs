//! Judges calls on names and contents of files. Landlock enforces what is let through, so "in doubt, go on" is right here: the kernel's own error is the
//! genuine one. What is refused here is a fact.
use std::os::fd::{AsFd, OwnedFd};

use dsh_policy::decide::{Verdict, read};
use dsh_policy::denial::{Operation, Rule};
use rustix::fs::{Access, CWD, FileType, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;

use crate::facts::Refusal;
use crate::mediate::{Decision, Judge, Parked, refusal};
use crate::natural;
use crate::object::{self, Found, Last, is_nameless, own_path};
use crate::sys::Answer;
use crate::terminals;

/// Judges one call of the file class.
pub(crate) fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    judge_call(judge, parked).unwrap_or(Decision::CONTINUE)
}

/// An error means that the call fails anyway or that nothing can be seen: then the kernel goes on by itself.
fn judge_call(judge: &Judge, parked: &Parked<'_>) -> Result<Decision, Errno> {
    use Operation as O;
    let here = libc::AT_FDCWD;
    let args = &parked.args;
    match parked.call.name {
        "openat" => open(judge, parked, parked.int(0), args[1], parked.int(2)),
        "open" => open(judge, parked, here, args[0], parked.int(1)),
        "creat" => open(
            judge,
            parked,
            here,
            args[0],
            libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC,
        ),
        "mkdir" => create(judge, parked, here, args[0], O::MakeDir),
        "mkdirat" => create(judge, parked, parked.int(0), args[1], O::MakeDir),
        "mknod" => create(judge, parked, here, args[0], node_operation(parked.bits(1))),
        "mknodat" => create(judge, parked, parked.int(0), args[1], node_operation(parked.bits(2))),
        "symlink" => create(judge, parked, here, args[1], O::Symlink),
        "symlinkat" => create(judge, parked, parked.int(1), args[2], O::Symlink),
        "unlink" => remove(judge, parked, here, args[0], O::RemoveFile),
        "rmdir" => remove(judge, parked, here, args[0], O::RemoveDir),
        "unlinkat" if parked.int(2) & libc::AT_REMOVEDIR != 0 => {
            remove(judge, parked, parked.int(0), args[1], O::RemoveDir)
        }
        "unlinkat" => remove(judge, parked, parked.int(0), args[1], O::RemoveFile),
        "rename" => rename(judge, parked, (here, args[0]), (here, args[1]), 0),
        "renameat" => rename(judge, parked, (parked.int(0), args[1]), (parked.int(2), args[3]), 0),
        "renameat2" => rename(
            judge,
            parked,
            (parked.int(0), args[1]),
            (parked.int(2), args[3]),
            parked.bits(4),
        ),
        "link" => link(judge, parked, (here, args[0]), (here, args[1]), 0),
        "linkat" => link(
            judge,
            parked,
            (parked.int(0), args[1]),
            (parked.int(2), args[3]),
            parked.int(4),
        ),
        "truncate" => truncate(judge, parked, args[0]),
        _ => Ok(Decision::CONTINUE),
    }
}

fn node_operation(mode: u32) -> Operation {
    match FileType::from_raw_mode(mode) {
        FileType::RegularFile | FileType::Unknown => Operation::CreateFile,
        _ => Operation::MakeNode,
    }
}

/// Whether the path is plainly allowed: without links or dots in it, so that its text is its canonical name, and permitted by name. One look by the
/// kernel confirms the first. Nothing is pinned, because nothing depends on it: the call goes on and Landlock looks at the object.
fn is_plain(judge: &Judge, parked: &Parked<'_>, at: i32, path: &[u8], operation: Operation) -> bool {
    if !judge.confinement.deny_read.is_empty() {
        return false;
    }
    let joined;
    let full = if path.first() == Some(&b'/') {
        path
    } else {
        match parked.view.descriptor_name(at) {
            Some(base) if base.first() == Some(&b'/') && !base.ends_with(b" (deleted)") => {
                joined = object::join(&base, path);
                &joined
            }
            _ => return false,
        }
    };
    let has_dots = full[1..]
        .split(|byte| *byte == b'/')
        .any(|name| matches!(name, b"" | b"." | b".."));
    if has_dots || full.starts_with(b"/proc/") || full.starts_with(b"/dev/") || judge.refuses(operation, full).is_some()
    {
        return false;
    }
    // Calls on a name do not follow a link there.
    let follows = matches!(
        operation,
        Operation::WriteFile | Operation::CreateFile | Operation::Truncate
    );
    let nofollow = if follows { OFlags::empty() } else { OFlags::NOFOLLOW };
    let flags = OFlags::PATH | OFlags::CLOEXEC | nofollow;
    matches!(
        judge.world.open(full, flags, ResolveFlags::NO_SYMLINKS),
        Ok(_) | Err(Errno::NOENT)
    )
}

fn open(judge: &Judge, parked: &Parked<'_>, at: i32, address: u64, flags: i32) -> Result<Decision, Errno> {
    if flags & libc::O_PATH != 0 {
        return Ok(Decision::CONTINUE); // Opens nothing; the other flags have no meaning.
    }
    let given = parked.view.text(address)?;
    if judge.confinement.devices.iter().any(|device| device.0 == given) {
        return Ok(Decision::CONTINUE); // Permitted whatever else is asked: every shell looks for its terminal like this.
    }
    let creates = flags & libc::O_CREAT != 0;
    if is_plain(
        judge,
        parked,
        at,
        &given,
        if creates {
            Operation::CreateFile
        } else {
            Operation::WriteFile
        },
    ) {
        return Ok(Decision::CONTINUE);
    }
    let exclusive = creates && flags & libc::O_EXCL != 0;
    let last = if exclusive || flags & libc::O_NOFOLLOW != 0 {
        Last::NoFollow
    } else {
        Last::Follow
    };
    let found = parked.view.resolve(at, &given, last)?;
    if is_nameless(&found) {
        return Ok(Decision::CONTINUE);
    }
    if let Verdict::Refuse(rule) = read(&judge.confinement, &found.path) {
        let failing = found
            .object
            .as_ref()
            .is_none_or(|object| natural::access(object, Access::READ_OK).is_some());
        return Ok(if failing {
            Decision::CONTINUE
        } else {
            refusal(Operation::ReadFile, rule, found, given)
        });
    }
    // Only where reads are asked about at all.
    if parked.reads(judge)
        && flags & libc::O_ACCMODE == libc::O_RDONLY
        && let Some(object) = &found.object
        && is_private_to_another(judge, object, &found.path)
    {
        return Ok(refusal(Operation::ReadFile, Rule::Confined, found, given));
    }
    let Some(operation) = open_operation(&found, flags)? else {
        return Ok(Decision::CONTINUE);
    };
    let Some(rule) = judge.refuses(operation, &found.path) else {
        return Ok(Decision::CONTINUE);
    };
    let own = |object: &&OwnedFd| is_own(judge, object, &found.path);
    if let Some(object) = found.object.as_ref().filter(own) {
        return Ok(open_for(parked, object, flags));
    }
    if open_fails_anyway(&found, operation, flags) {
        return Ok(Decision::CONTINUE);
    }
    Ok(refusal(operation, rule, found, given))
}

/// What an `open` would do to the object; none when it changes nothing or fails by its nature.
fn open_operation(found: &Found, flags: i32) -> Result<Option<Operation>, Errno> {
    let creates = flags & libc::O_CREAT != 0;
    let unnamed = flags & libc::O_TMPFILE == libc::O_TMPFILE;
    let Some(object) = &found.object else {
        return Ok((creates && !found.trailing_slash).then_some(Operation::CreateFile));
    };
    let writes = matches!(flags & libc::O_ACCMODE, libc::O_WRONLY | libc::O_RDWR);
    let fails = match object::kind(object)? {
        FileType::Directory => !unnamed,
        FileType::Symlink | FileType::Socket => true,
        _ => found.trailing_slash || flags & libc::O_DIRECTORY != 0,
    };
    Ok(match () {
        () if fails || (creates && flags & libc::O_EXCL != 0) => None,
        () if unnamed => Some(Operation::CreateFile),
        () if writes => Some(Operation::WriteFile),
        () if flags & libc::O_TRUNC != 0 => Some(Operation::Truncate),
        // Reading, or access mode 3, which opens for device commands only.
        () => None,
    })
}

fn open_fails_anyway(found: &Found, operation: Operation, flags: i32) -> bool {
    let Some(object) = &found.object else {
        return natural::create(found, false).is_some();
    };
    let mut wanted = Access::WRITE_OK;
    if operation == Operation::CreateFile {
        wanted |= Access::EXEC_OK;
    } else if flags & libc::O_ACCMODE == libc::O_RDWR {
        wanted |= Access::READ_OK;
    }
    natural::access(object, wanted).is_some()
}

/// What the command may write to although no root holds it, and Landlock cannot tell from what belongs to others.
fn is_own(judge: &Judge, object: &OwnedFd, path: &[u8]) -> bool {
    is_of_own_process(judge, object, path) || terminals::is_own(path)
}

/// Whether the object is one of the kernel's files about a process of the command itself (`/proc/PID/comm`, `oom_score_adj`, `mem`, …). Writing to them is
/// no effect on a file of the host, but Landlock has no rule for "my own processes".
fn is_of_own_process(judge: &Judge, object: &OwnedFd, path: &[u8]) -> bool {
    let number = path
        .strip_prefix(b"/proc/")
        .and_then(|rest| rest.split(|byte| *byte == b'/').next());
    let pid = number.and_then(|number| std::str::from_utf8(number).ok()?.parse().ok());
    pid.is_some_and(|pid| judge.world.is_own_process(pid))
        && rustix::fs::fstatfs(object).is_ok_and(|system| system.f_type == libc::PROC_SUPER_MAGIC)
}

/// Whether the object tells of another's process what only its user may know (and what a command's arguments say): memory, environment, descriptors.
/// The rest (`stat`, `status`, `comm`) lists processes as `ps` does.
fn is_private_to_another(judge: &Judge, object: &OwnedFd, path: &[u8]) -> bool {
    const LISTED: [&[u8]; 4] = [b"stat", b"status", b"statm", b"comm"];
    let Some((number, file)) = path.strip_prefix(b"/proc/").and_then(|rest| {
        let slash = rest.iter().position(|byte| *byte == b'/')?;
        Some((&rest[..slash], &rest[slash + 1..]))
    }) else {
        return false;
    };
    let pid = std::str::from_utf8(number).ok().and_then(|number| number.parse().ok());
    let readable = || {
        openat(
            CWD,
            own_path(object.as_fd()),
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
            Mode::empty(),
        )
        .is_ok()
    };
    // With processes of its own a command sees no others.
    !judge.world.is_apart()
        && pid.is_some_and(|pid| !judge.world.is_own_process(pid))
        && !LISTED.contains(&file)
        && rustix::fs::fstatfs(object).is_ok_and(|system| system.f_type == libc::PROC_SUPER_MAGIC)
        // Root could read it, but for the powers that the helper has given up as well.
        && (judge.privileged || readable())
}

/// Opens such a file for the caller; the supervisor may do to its descendants what they may do to each other. A terminal does not become the
/// supervisor's own by that; a command that wants one as its controlling terminal says so (`TIOCSCTTY`).
fn open_for(parked: &Parked<'_>, object: &OwnedFd, flags: i32) -> Decision {
    let kept = flags & (libc::O_ACCMODE | libc::O_NONBLOCK);
    let mode = OFlags::from_bits_retain(kept.cast_unsigned()) | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = match openat(CWD, own_path(object.as_fd()), mode, Mode::empty()) {
        Ok(file) => file,
        Err(errno) => return Decision::fail(errno),
    };
    match parked
        .listener
        .deliver(parked.id, file.as_fd(), flags & libc::O_CLOEXEC != 0)
    {
        Ok(()) => Decision::Answer(Answer::Delivered),
        Err(error) => Decision::Answer(Answer::Fail(error.raw_os_error().unwrap_or(libc::EACCES))),
    }
}

fn create(judge: &Judge, parked: &Parked<'_>, at: i32, address: u64, operation: Operation) -> Result<Decision, Errno> {
    let given = parked.view.text(address)?;
    if is_plain(judge, parked, at, &given, operation) {
        return Ok(Decision::CONTINUE);
    }
    let found = parked.view.resolve(at, &given, Last::Name)?;
    let Some(rule) = judge.refuses(operation, &found.path) else {
        return Ok(Decision::CONTINUE);
    };
    if natural::create(&found, operation == Operation::MakeDir).is_some() {
        return Ok(Decision::CONTINUE);
    }
    Ok(refusal(operation, rule, found, given))
}

fn remove(judge: &Judge, parked: &Parked<'_>, at: i32, address: u64, operation: Operation) -> Result<Decision, Errno> {
    let given = parked.view.text(address)?;
    if is_plain(judge, parked, at, &given, operation) {
        return Ok(Decision::CONTINUE);
    }
    let found = parked.view.resolve(at, &given, Last::Name)?;
    let Some(rule) = judge.refuses(operation, &found.path) else {
        return Ok(Decision::CONTINUE);
    };
    if natural::remove(&found, Some(operation == Operation::RemoveDir)).is_some() {
        return Ok(Decision::CONTINUE);
    }
    Ok(refusal(operation, rule, found, given))
}

/// A descriptor that a path is relative to, and where the path is.
type PathArgument = (i32, u64);

fn rename(
    judge: &Judge,
    parked: &Parked<'_>,
    old: PathArgument,
    new: PathArgument,
    flags: u32,
) -> Result<Decision, Errno> {
    let operation = Operation::Rename;
    let (old_given, new_given) = (parked.view.text(old.1)?, parked.view.text(new.1)?);
    if is_plain(judge, parked, old.0, &old_given, operation) && is_plain(judge, parked, new.0, &new_given, operation) {
        return Ok(Decision::CONTINUE);
    }
    let old = parked.view.resolve(old.0, &old_given, Last::Name)?;
    let new = parked.view.resolve(new.0, &new_given, Last::Name)?;
    let Some(rule) = judge
        .refuses(operation, &old.path)
        .or_else(|| judge.refuses(operation, &new.path))
    else {
        return Ok(Decision::CONTINUE);
    };
    if natural::rename(&old, &new, flags).is_some() {
        return Ok(Decision::CONTINUE);
    }
    Ok(two_names(operation, rule, old, old_given, new))
}

fn link(
    judge: &Judge,
    parked: &Parked<'_>,
    old: PathArgument,
    new: PathArgument,
    flags: i32,
) -> Result<Decision, Errno> {
    let operation = Operation::Link;
    let (old_given, new_given) = (parked.view.text(old.1)?, parked.view.text(new.1)?);
    let by_descriptor = old_given.is_empty() && flags & libc::AT_EMPTY_PATH != 0;
    let last = if flags & libc::AT_SYMLINK_FOLLOW != 0 {
        Last::Follow
    } else {
        Last::NoFollow
    };
    let old = if by_descriptor {
        parked.view.found(old.0)?
    } else {
        parked.view.resolve(old.0, &old_given, last)?
    };
    let new = parked.view.resolve(new.0, &new_given, Last::Name)?;
    // An unnamed file (`O_TMPFILE`) was opened in the folder that its name shows, and only there a link can give it one.
    let source = if is_unlinked(&old) {
        None
    } else {
        judge.refuses(operation, &old.path)
    };
    let Some(rule) = source.or_else(|| judge.refuses(operation, &new.path)) else {
        return Ok(Decision::CONTINUE);
    };
    if natural::link(&old, &new).is_some() {
        return Ok(Decision::CONTINUE);
    }
    Ok(two_names(operation, rule, old, old_given, new))
}

fn is_unlinked(found: &Found) -> bool {
    found
        .object
        .as_ref()
        .and_then(|object| rustix::fs::fstat(object).ok())
        .is_some_and(|stat| stat.st_nlink == 0)
}

fn two_names(operation: Operation, rule: Rule, old: Found, given: Vec<u8>, new: Found) -> Decision {
    let second = Some(new.path);
    Decision::Refuse(Refusal {
        operation,
        rule,
        path: Some(old.path),
        given: Some(given),
        second,
        detail: None,
    })
}

fn truncate(judge: &Judge, parked: &Parked<'_>, address: u64) -> Result<Decision, Errno> {
    let operation = Operation::Truncate;
    let given = parked.view.text(address)?;
    let found = parked.view.resolve(libc::AT_FDCWD, &given, Last::Follow)?;
    let Some(object) = &found.object else {
        return Ok(Decision::CONTINUE);
    };
    if is_nameless(&found) || object::kind(object)? != FileType::RegularFile {
        return Ok(Decision::CONTINUE);
    }
    let Some(rule) = judge.refuses(operation, &found.path) else {
        return Ok(Decision::CONTINUE);
    };
    if natural::access(object, Access::WRITE_OK).is_some() {
        return Ok(Decision::CONTINUE);
    }
    Ok(refusal(operation, rule, found, given))
}

/// Answers a question about write access with what a write would get. No effect was tried, so a "no" is no fact.
pub(crate) fn judge_access(judge: &Judge, parked: &Parked<'_>) -> Decision {
    access(judge, parked).unwrap_or(Decision::CONTINUE)
}

fn access(judge: &Judge, parked: &Parked<'_>) -> Result<Decision, Errno> {
    let (at, address, flags) = match parked.call.name {
        "access" => (libc::AT_FDCWD, parked.args[0], 0),
        "faccessat2" => (parked.int(0), parked.args[1], parked.int(3)),
        _ => (parked.int(0), parked.args[1], 0),
    };
    let given = parked.view.text(address)?;
    let last = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 {
        Last::NoFollow
    } else {
        Last::Follow
    };
    let found = match given.as_slice() {
        [] if flags & libc::AT_EMPTY_PATH != 0 => parked.view.found(at)?,
        _ => parked.view.resolve(at, &given, last)?,
    };
    let Some(object) = &found.object else {
        return Ok(Decision::CONTINUE);
    };
    if is_nameless(&found)
        || judge.refuses(Operation::CheckAccess, &found.path).is_none()
        || is_own(judge, object, &found.path)
        || natural::access(object, Access::WRITE_OK).is_some()
    {
        return Ok(Decision::CONTINUE);
    }
    Ok(Decision::fail(Errno::ACCESS))
}
