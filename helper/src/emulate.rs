//! Metadata calls, done by the supervisor on the caller's behalf: nothing else in this tier enforces them.
//!
//! The object is pinned first, its canonical name judged, and the call made on the pinned object; the caller gets the kernel's own result. Arguments are
//! read once. A call that cannot be understood is answered with its error, never let through: its memory may have changed meanwhile.
use std::ffi::CString;
use std::os::fd::{AsFd, OwnedFd};

use dsh_policy::denial::Operation;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, XattrFlags, openat};
use rustix::io::Errno;

use crate::calls::SYS_FILE_SETATTR;
use crate::facts::Refusal;
use crate::mediate::{Decision, Judge, Parked, refusal};
use crate::natural;
use crate::object::{Found, Last, View, is_nameless, own_path};
use crate::sys::{self, Answer};

const NAME_MAX: usize = 255;
const VALUE_MAX: usize = 65536;
/// Largest `struct file_attr` that is passed on; later versions of the kernel only append to it.
const FILE_ATTR_MAX: usize = 256;

/// A change of metadata with its arguments read.
#[derive(Debug)]
enum Change {
    Mode(u32),
    Owner(u32, u32),
    Times(Option<[libc::timespec; 2]>),
    SetAttribute { name: CString, value: Vec<u8>, flags: u32 },
    RemoveAttribute { name: CString },
    Flags { command: u32, argument: [u8; 32] },
    FileAttributes { argument: Vec<u8> },
}

/// Which object a call names.
#[derive(Clone, Copy, Debug)]
enum Target {
    /// By a path.
    Path {
        at: i32,
        address: u64,
        last: Last,
        may_be_empty: bool,
    },
    /// By a descriptor that has to be open for more than its name.
    Descriptor(i32),
}

/// Judges and performs one call of the metadata class.
pub(crate) fn judge(judge: &Judge, parked: &Parked<'_>) -> Decision {
    let view = parked.view;
    let read = read_call(parked).and_then(|(target, change)| Ok((change, target.read(view)?)));
    match read {
        Ok((change, named)) => perform(judge, parked, &change, named).unwrap_or_else(Decision::fail),
        // Not even the name can be read: a process that hides its memory. Nobody can say what it would have changed.
        Err(Errno::PERM | Errno::SRCH) => Decision::Refuse(Refusal::of(
            Operation::ChangeMode,
            judge.blind_rule(),
            Some("object unknown".to_owned()),
        )),
        Err(errno) => Decision::fail(errno),
    }
}

fn perform(judge: &Judge, parked: &Parked<'_>, change: &Change, named: Named) -> Result<Decision, Errno> {
    let (found, given) = named.pin(parked.view)?;
    let Some(object) = &found.object else {
        return Err(Errno::NOENT);
    };
    let operation = change.operation();
    if !is_nameless(&found)
        && let Some(rule) = judge.refuses(operation, &found.path)
    {
        return Ok(match change.fails_anyway(object) {
            Some(errno) => Decision::fail(errno),
            None => refusal(operation, rule, found, given),
        });
    }
    if !parked.listener.is_waiting(parked.id) {
        return Err(Errno::INTR); // Nobody waits for it any more; the thread's number may be another's.
    }
    change.apply(object)?;
    Ok(Decision::Answer(Answer::Value(0)))
}

/// A target with its text read.
#[derive(Debug)]
enum Named {
    Path {
        at: i32,
        given: Vec<u8>,
        last: Last,
    },
    /// The object behind a descriptor, whatever it was opened for.
    Held(i32),
    /// The object behind a descriptor that has to be open for more than its name.
    Open(i32),
}

impl Target {
    /// Reads the path; after this nothing of the caller's memory matters any more.
    fn read(self, view: View<'_>) -> Result<Named, Errno> {
        match self {
            Self::Descriptor(fd) => Ok(Named::Open(fd)),
            Self::Path {
                at,
                address: 0,
                may_be_empty: true,
                ..
            } => Ok(Named::Held(at)),
            Self::Path {
                at,
                address,
                last,
                may_be_empty,
            } => Ok(match view.text(address)? {
                given if given.is_empty() && may_be_empty => Named::Held(at),
                given => Named::Path { at, given, last },
            }),
        }
    }
}

impl Named {
    /// The object itself, and its name as the caller gave it or, for a descriptor, as the kernel knows it.
    fn pin(self, view: View<'_>) -> Result<(Found, Vec<u8>), Errno> {
        match self {
            Self::Path { at, given, last } => Ok((view.resolve(at, &given, last)?, given)),
            Self::Held(fd) => {
                let found = view.found(fd)?;
                let name = found.path.clone();
                Ok((found, name))
            }
            Self::Open(fd) => {
                let flags = view.descriptor_flags(fd);
                let pinned = Self::Held(fd).pin(view)?;
                match flags {
                    Some(flags) if flags & libc::O_PATH.cast_unsigned() == 0 => Ok(pinned),
                    _ => Err(Errno::BADF),
                }
            }
        }
    }
}

/// Reads which object and which change a call means.
fn read_call(parked: &Parked<'_>) -> Result<(Target, Change), Errno> {
    let here = libc::AT_FDCWD;
    let view = parked.view;
    let args = &parked.args;
    let path = |at: i32, address: u64, last: Last| Target::Path {
        at,
        address,
        last,
        may_be_empty: false,
    };
    let with_flags = |at: i32, address: u64, flags: i32| {
        if flags & !(libc::AT_SYMLINK_NOFOLLOW | libc::AT_EMPTY_PATH) != 0 {
            return Err(Errno::INVAL);
        }
        let last = if flags & libc::AT_SYMLINK_NOFOLLOW != 0 {
            Last::NoFollow
        } else {
            Last::Follow
        };
        Ok(Target::Path {
            at,
            address,
            last,
            may_be_empty: flags & libc::AT_EMPTY_PATH != 0,
        })
    };
    Ok(match parked.call.name {
        "chmod" => (path(here, args[0], Last::Follow), Change::Mode(parked.bits(1))),
        "fchmod" => (Target::Descriptor(parked.int(0)), Change::Mode(parked.bits(1))),
        "fchmodat" => (path(parked.int(0), args[1], Last::Follow), Change::Mode(parked.bits(2))),
        "fchmodat2" => (
            with_flags(parked.int(0), args[1], parked.int(3))?,
            Change::Mode(parked.bits(2)),
        ),
        "chown" => (
            path(here, args[0], Last::Follow),
            Change::Owner(parked.bits(1), parked.bits(2)),
        ),
        "lchown" => (
            path(here, args[0], Last::NoFollow),
            Change::Owner(parked.bits(1), parked.bits(2)),
        ),
        "fchown" => (
            Target::Descriptor(parked.int(0)),
            Change::Owner(parked.bits(1), parked.bits(2)),
        ),
        "fchownat" => (
            with_flags(parked.int(0), args[1], parked.int(4))?,
            Change::Owner(parked.bits(2), parked.bits(3)),
        ),
        "utime" => (
            path(here, args[0], Last::Follow),
            Change::Times(seconds(view, args[1])?),
        ),
        "utimes" => (
            path(here, args[0], Last::Follow),
            Change::Times(microseconds(view, args[1])?),
        ),
        "futimesat" if args[1] == 0 => (
            Target::Descriptor(parked.int(0)),
            Change::Times(microseconds(view, args[2])?),
        ),
        "futimesat" => (
            path(parked.int(0), args[1], Last::Follow),
            Change::Times(microseconds(view, args[2])?),
        ),
        "utimensat" if args[1] == 0 => {
            if parked.int(3) != 0 {
                return Err(Errno::INVAL);
            }
            (
                Target::Descriptor(parked.int(0)),
                Change::Times(nanoseconds(view, args[2])?),
            )
        }
        "utimensat" => (
            with_flags(parked.int(0), args[1], parked.int(3))?,
            Change::Times(nanoseconds(view, args[2])?),
        ),
        "setxattr" => (path(here, args[0], Last::Follow), set_attribute(view, args)?),
        "lsetxattr" => (path(here, args[0], Last::NoFollow), set_attribute(view, args)?),
        "fsetxattr" => (Target::Descriptor(parked.int(0)), set_attribute(view, args)?),
        "removexattr" => (path(here, args[0], Last::Follow), remove_attribute(view, args[1])?),
        "lremovexattr" => (path(here, args[0], Last::NoFollow), remove_attribute(view, args[1])?),
        "fremovexattr" => (Target::Descriptor(parked.int(0)), remove_attribute(view, args[1])?),
        "setxattrat" => (
            with_flags(parked.int(0), args[1], parked.int(2))?,
            set_attribute_at(view, args)?,
        ),
        "removexattrat" => (
            with_flags(parked.int(0), args[1], parked.int(2))?,
            remove_attribute(view, args[3])?,
        ),
        "file_setattr" => (
            with_flags(parked.int(0), args[1], parked.int(4))?,
            file_attributes(view, args)?,
        ),
        "ioctl" => {
            let mut argument = [0; 32];
            // The commands of the table take 4, 8 or 28 bytes; their number says how many.
            let size = (parked.bits(1) >> 16 & 0x3fff) as usize;
            let length = if size == 28 { 28 } else { 4 };
            view.bytes(args[2], &mut argument[..length])?;
            (
                Target::Descriptor(parked.int(0)),
                Change::Flags {
                    command: parked.bits(1),
                    argument,
                },
            )
        }
        _ => return Err(Errno::NOSYS),
    })
}

fn words<const N: usize>(view: View<'_>, address: u64) -> Result<Option<[i64; N]>, Errno> {
    if address == 0 {
        return Ok(None);
    }
    let mut bytes = vec![0; N * 8];
    view.bytes(address, &mut bytes)?;
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = i64::from_ne_bytes(*chunk);
    }
    Ok(Some(words))
}

fn time(tv_sec: i64, tv_nsec: i64) -> libc::timespec {
    libc::timespec { tv_sec, tv_nsec }
}

/// Of `struct utimbuf`.
fn seconds(view: View<'_>, address: u64) -> Result<Option<[libc::timespec; 2]>, Errno> {
    Ok(words::<2>(view, address)?.map(|[access, change]| [time(access, 0), time(change, 0)]))
}

/// Of two `struct timeval`.
fn microseconds(view: View<'_>, address: u64) -> Result<Option<[libc::timespec; 2]>, Errno> {
    let Some([access, access_us, change, change_us]) = words::<4>(view, address)? else {
        return Ok(None);
    };
    // Checked here because a special value of the nanoseconds below could come out of the multiplication.
    if !(0..1_000_000).contains(&access_us) || !(0..1_000_000).contains(&change_us) {
        return Err(Errno::INVAL);
    }
    Ok(Some([time(access, access_us * 1000), time(change, change_us * 1000)]))
}

/// Of two `struct timespec`, with their special values.
fn nanoseconds(view: View<'_>, address: u64) -> Result<Option<[libc::timespec; 2]>, Errno> {
    Ok(words::<4>(view, address)?
        .map(|[access, access_ns, change, change_ns]| [time(access, access_ns), time(change, change_ns)]))
}

fn attribute_name(view: View<'_>, address: u64) -> Result<CString, Errno> {
    let name = view.text(address).map_err(|errno| {
        if errno == Errno::NAMETOOLONG {
            Errno::RANGE
        } else {
            errno
        }
    })?;
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno::RANGE);
    }
    CString::new(name).map_err(|_| Errno::INVAL)
}

fn attribute_value(view: View<'_>, address: u64, size: u64) -> Result<Vec<u8>, Errno> {
    let size = usize::try_from(size)
        .ok()
        .filter(|size| *size <= VALUE_MAX)
        .ok_or(Errno::TOOBIG)?;
    let mut value = vec![0; size];
    if size > 0 {
        view.bytes(address, &mut value)?;
    }
    Ok(value)
}

fn set_attribute(view: View<'_>, args: &[u64; 6]) -> Result<Change, Errno> {
    let flags = args[4] as u32;
    Ok(Change::SetAttribute {
        name: attribute_name(view, args[1])?,
        value: attribute_value(view, args[2], args[3])?,
        flags,
    })
}

fn remove_attribute(view: View<'_>, name: u64) -> Result<Change, Errno> {
    Ok(Change::RemoveAttribute {
        name: attribute_name(view, name)?,
    })
}

/// `struct xattr_args`: address, size and flags of the value.
fn set_attribute_at(view: View<'_>, args: &[u64; 6]) -> Result<Change, Errno> {
    let mut request = [0u8; 16];
    if args[5] < request.len() as u64 {
        return Err(Errno::INVAL);
    }
    view.bytes(args[4], &mut request)?;
    let number = |range: std::ops::Range<usize>| {
        request[range]
            .iter()
            .rev()
            .fold(0u64, |n, byte| n << 8 | u64::from(*byte))
    };
    let value = attribute_value(view, number(0..8), number(8..12))?;
    Ok(Change::SetAttribute {
        name: attribute_name(view, args[3])?,
        value,
        flags: number(12..16) as u32,
    })
}

fn file_attributes(view: View<'_>, args: &[u64; 6]) -> Result<Change, Errno> {
    let size = usize::try_from(args[3])
        .ok()
        .filter(|size| *size <= FILE_ATTR_MAX)
        .ok_or(Errno::TOOBIG)?;
    let mut argument = vec![0; size];
    view.bytes(args[2], &mut argument)?;
    Ok(Change::FileAttributes { argument })
}

impl Change {
    fn operation(&self) -> Operation {
        match self {
            Self::Mode(_) => Operation::ChangeMode,
            Self::Owner(..) => Operation::ChangeOwner,
            Self::Times(_) => Operation::ChangeTimes,
            Self::SetAttribute { name, .. } | Self::RemoveAttribute { name }
                if name.to_bytes().starts_with(b"system.posix_acl") =>
            {
                Operation::ChangeMode
            }
            Self::SetAttribute { .. } | Self::RemoveAttribute { .. } => Operation::ChangeXattr,
            Self::Flags { .. } | Self::FileAttributes { .. } => Operation::ChangeFlags,
        }
    }

    /// The error that this user would get without a sandbox.
    fn fails_anyway(&self, object: &OwnedFd) -> Option<Errno> {
        let write = rustix::fs::Access::WRITE_OK;
        match self {
            Self::Times(None) => natural::owner_only(object).and_then(|_| natural::access(object, write)),
            Self::SetAttribute { name, .. } | Self::RemoveAttribute { name } => match name.to_bytes() {
                name if name.starts_with(b"user.") => natural::access(object, write),
                name if name.starts_with(b"system.posix_acl") => natural::owner_only(object),
                // The others need a capability, which an ordinary user does not have; root had it.
                _ if rustix::process::geteuid().is_root() => natural::owner_only(object),
                _ => Some(Errno::PERM),
            },
            Self::Owner(user, _) if *user != u32::MAX && !rustix::process::geteuid().is_root() => {
                let own = rustix::process::geteuid().as_raw();
                if *user == own {
                    natural::owner_only(object)
                } else {
                    Some(Errno::PERM)
                }
            }
            _ => natural::owner_only(object),
        }
    }

    fn apply(&self, object: &OwnedFd) -> Result<(), Errno> {
        let path = own_path(object.as_fd());
        let converted = |result: std::io::Result<()>| result.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO));
        match self {
            Self::Mode(mode) => rustix::fs::chmod(path, Mode::from_bits_retain(mode & 0o7777)),
            Self::Owner(user, group) => {
                let id = |number: u32| (number != u32::MAX).then_some(number);
                let (user, group) = (
                    id(*user).map(rustix::fs::Uid::from_raw),
                    id(*group).map(rustix::fs::Gid::from_raw),
                );
                rustix::fs::chownat(object, "", user, group, AtFlags::EMPTY_PATH)
            }
            Self::Times(times) => converted(sys::set_times(object.as_fd(), *times)),
            Self::SetAttribute { name, value, flags } => {
                rustix::fs::setxattr(path, name.as_c_str(), value, XattrFlags::from_bits_retain(*flags))
            }
            Self::RemoveAttribute { name } => rustix::fs::removexattr(path, name.as_c_str()),
            Self::Flags { command, argument } => {
                let file = openat(
                    CWD,
                    path,
                    OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
                    Mode::empty(),
                )?;
                converted(sys::flags_ioctl(file.as_fd(), *command, &mut argument.clone()))
            }
            Self::FileAttributes { argument } => {
                let path = CString::new(path).map_err(|_| Errno::INVAL)?;
                converted(sys::attribute_call(SYS_FILE_SETATTR, &path, &mut argument.clone(), 0))
            }
        }
    }
}
