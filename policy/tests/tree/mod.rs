//! A small folder tree with everything that makes paths hard.
#![allow(dead_code, clippy::unwrap_used)]

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use dsh_policy::ByteString;

/// `work` (with a file, a link to `far/deep`, odd names), `far/deep`, `home`; removed when dropped.
pub(crate) struct Tree {
    _dir: tempfile::TempDir,
    pub(crate) root: PathBuf,
    pub(crate) home: PathBuf,
}

impl Tree {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        for name in [
            &b"work/sub"[..],
            b"work/with space\nand line",
            b"work/l\xff",
            b"far/deep",
            b"home/.ssh",
        ] {
            std::fs::create_dir_all(root.join(OsStr::from_bytes(name))).unwrap();
        }
        std::fs::write(root.join("work/file"), "").unwrap();
        symlink(root.join("far/deep"), root.join("work/link")).unwrap();
        Self {
            _dir: dir,
            home: root.join("home"),
            root,
        }
    }

    /// The absolute path of a name in the tree.
    pub(crate) fn path(&self, name: &str) -> ByteString {
        let path = if name.is_empty() {
            self.root.clone()
        } else {
            self.root.join(name)
        };
        path.into()
    }
}
