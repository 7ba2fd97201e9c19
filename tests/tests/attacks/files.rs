//! Files outside: contents, names, metadata, by path, link, descriptor and `/proc`.
use dsh_policy::denial::Operation as O;

use super::{Attack, attack, control, door, nothing, perhaps};

pub(crate) const DOORS: &[Attack] = &[
    door(&["open-wronly", "O/file"], "openat", O::WriteFile),
    door(&["open-rdwr", "O/file"], "openat", O::WriteFile),
    door(&["open-append", "O/file"], "openat", O::WriteFile),
    door(&["open-trunc", "O/file"], "openat", O::WriteFile),
    door(&["open-trunc-rdonly", "O/file"], "openat", O::Truncate),
    door(&["open-creat", "O/made"], "openat", O::CreateFile),
    door(&["open-creat-excl", "O/made"], "openat", O::CreateFile),
    door(&["open-creat", "O/dangling"], "openat", O::CreateFile),
    door(&["open-tmpfile", "O"], "openat", O::CreateFile),
    door(&["open-dirfd", "O/dir", "made"], "openat", O::CreateFile),
    door(&["open-dirfd", "O/dir", "../file"], "openat", O::WriteFile),
    door(&["reopen-rdonly", "O/file"], "openat", O::WriteFile),
    door(&["reopen-path", "O/file"], "openat", O::WriteFile),
    door(&["truncate", "O/file"], "truncate", O::Truncate),
    door(&["mkdirat", "O/made"], "mkdirat", O::MakeDir),
    door(&["unlinkat", "O/file"], "unlinkat", O::RemoveFile),
    door(&["unlinkat-dir", "O/dir"], "unlinkat", O::RemoveDir),
    door(&["unlinkat-dirfd", "O/full", "inner"], "unlinkat", O::RemoveFile),
    door(&["renameat2", "O/file", "O/made"], "renameat2", O::Rename),
    door(&["renameat2-noreplace", "O/file", "O/made"], "renameat2", O::Rename),
    door(&["renameat2-exchange", "O/file", "O/full"], "renameat2", O::Rename),
    door(&["linkat", "O/file", "O/made"], "linkat", O::Link),
    door(&["linkat-magic", "O/file", "O/made"], "linkat", O::Link),
    door(&["symlinkat", "anywhere", "O/made"], "symlinkat", O::Symlink),
    door(&["mkfifo", "O/made"], "mknodat", O::MakeNode),
    door(&["mknod-file", "O/made"], "mknodat", O::CreateFile),
    door(&["mknod-socket", "O/made"], "mknodat", O::MakeNode),
    door(&["bind-unix", "O/made"], "bind", O::MakeNode),
    door(&["fchmodat", "O/file"], "fchmodat", O::ChangeMode),
    door(&["fchmod-rdonly", "O/file"], "fchmod", O::ChangeMode),
    door(&["fchmodat2-empty", "O/file"], "fchmodat2", O::ChangeMode),
    door(&["chmod-magic", "O/file"], "fchmodat", O::ChangeMode),
    door(&["chmod-proc-exe", "O/file"], "fchmodat", O::ChangeMode),
    door(&["fchown-rdonly", "O/file"], "fchown", O::ChangeOwner),
    door(&["fchownat", "O/file"], "fchownat", O::ChangeOwner),
    door(&["fchownat-empty", "O/file"], "fchownat", O::ChangeOwner),
    door(&["utimensat", "O/file"], "utimensat", O::ChangeTimes),
    door(&["utimensat-now", "O/file"], "utimensat", O::ChangeTimes),
    door(&["futimens-rdonly", "O/file"], "utimensat", O::ChangeTimes),
    door(&["setxattr", "O/file"], "setxattr", O::ChangeXattr),
    door(&["fsetxattr-rdonly", "O/file"], "fsetxattr", O::ChangeXattr),
    door(&["removexattr", "O/attr"], "removexattr", O::ChangeXattr),
    perhaps(&["setxattrat", "O/file"], "setxattrat", O::ChangeXattr),
    perhaps(&["removexattrat", "O/attr"], "removexattrat", O::ChangeXattr),
    perhaps(&["setxattr-acl", "O/file"], "setxattr", O::ChangeMode),
    perhaps(&["ioctl-setflags", "O/file"], "ioctl", O::ChangeFlags),
    perhaps(&["ioctl-fssetxattr", "O/file"], "ioctl", O::ChangeFlags),
    perhaps(&["file_setattr", "O/file"], "file_setattr", O::ChangeFlags),
    // A question: the answer is the truth, and no effect was tried.
    nothing(&["access-w", "O/file"], "EACCES"),
    // Calls that carry other numbers, or their flags in memory, do not exist.
    nothing(&["openat2", "O/file"], "ENOSYS"),
    nothing(&["x32-chmod", "O/file"], "ENOSYS"),
    nothing(&["int80-chmod", "O/file"], "ENOSYS"),
];

#[test]
fn files_outside_stay_as_they_are() {
    attack("full", DOORS);
}

#[test]
fn unconfined_the_doors_to_files_are_open() {
    control(DOORS);
}
