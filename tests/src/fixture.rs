//! The files that probes act on, the same in the workspace and outside.
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::XattrFlags;

use crate::User;

/// Fills `place` afresh: `file`, `other`, `attr` (with an extended attribute), `dir/`, `full/inner`, `link` to `file`, `dangling` to the missing `made`.
pub fn lay(place: &Path, user: User) {
    for entry in fs::read_dir(place).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            fs::remove_dir_all(&path)
        } else {
            fs::remove_file(&path)
        }
        .unwrap();
    }
    for name in ["file", "other", "attr", "full/inner"] {
        let path = place.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("content of {name}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    }
    fs::create_dir(place.join("dir")).unwrap();
    symlink("file", place.join("link")).unwrap();
    symlink("made", place.join("dangling")).unwrap();
    rustix::fs::setxattr(place.join("attr"), "user.dsh", b"set before", XattrFlags::empty())
        .expect("the file system of /var/tmp has extended attributes");
    for name in ["file", "other", "attr", "full", "full/inner", "dir", "link", "dangling"] {
        user.own(&place.join(name));
    }
}
