//! Path identity: every path of a request is resolved once, as the kernel resolves it, and only the outcome is used from then on.
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::bytes::ByteString;

/// The canonical path of a folder that can be entered.
///
/// # Errors
/// The reason in a few words: `not found`, `not a directory`, `permission denied`, …
pub(crate) fn usable_folder(path: &Path) -> Result<PathBuf, String> {
    let canonical = path.canonicalize().map_err(|error| reason(&error))?;
    if !canonical.metadata().map_err(|error| reason(&error))?.is_dir() {
        return Err("not a directory".to_owned());
    }
    // Looking at the folder's own `.` needs the permission to search it, which is what entering it needs.
    std::fs::symlink_metadata(canonical.join(".")).map_err(|error| reason(&error))?;
    Ok(canonical)
}

/// The canonical path of whatever is there.
///
/// # Errors
/// The reason in a few words.
pub(crate) fn existing(path: &Path) -> Result<PathBuf, String> {
    path.canonicalize().map_err(|error| reason(&error))
}

/// The canonical path of the part that is there, and the rest by name: for rules about what may appear later.
pub(crate) fn as_far_as_it_exists(path: &Path) -> PathBuf {
    let mut rest = Vec::new();
    let mut known = path;
    loop {
        if let Ok(canonical) = known.canonicalize() {
            return rest.iter().rev().fold(canonical, |whole, name| append(whole, *name));
        }
        let Some(last) = known.components().next_back() else {
            return path.to_path_buf();
        };
        rest.push(last);
        let Some(parent) = known.parent() else {
            return path.to_path_buf();
        };
        known = parent;
    }
}

/// The name itself, with only the folder that holds it resolved: a symbolic link stays a link. None for `/` and what ends in `..`.
pub(crate) fn entry_itself(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?;
    Some(as_far_as_it_exists(path.parent()?).join(name))
}

/// What is not there cannot be a link, so a name is just appended and `..` takes one away.
fn append(mut whole: PathBuf, name: Component<'_>) -> PathBuf {
    match name {
        Component::ParentDir => {
            whole.pop();
        }
        Component::Normal(name) => whole.push(name),
        Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
    }
    whole
}

/// `~` and `~/…` become the home folder; none when there is no home folder.
pub(crate) fn expand_home(path: &ByteString, home: Option<&Path>) -> Option<PathBuf> {
    match path.as_bytes() {
        b"~" => home.map(Path::to_path_buf),
        [b'~', b'/', rest @ ..] => home.map(|home| home.join(ByteString::from(rest).as_path())),
        _ => Some(path.to_path_buf()),
    }
}

/// Has no stable name in the standard library yet.
const ELOOP: i32 = 40;

/// What went wrong, in the words of the contract where it has some.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "not found".to_owned(),
        io::ErrorKind::NotADirectory => "not a directory".to_owned(),
        io::ErrorKind::PermissionDenied => "permission denied".to_owned(),
        _ if error.raw_os_error() == Some(ELOOP) => "too many levels of symbolic links".to_owned(),
        io::ErrorKind::InvalidFilename => "the name is too long".to_owned(),
        io::ErrorKind::InvalidInput => "the path has a NUL byte".to_owned(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_link_followed_by_dot_dot_lands_where_chdir_lands() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("far/deep")).unwrap();
        std::os::unix::fs::symlink(root.join("far/deep"), root.join("link")).unwrap();
        assert_eq!(usable_folder(&root.join("link/..")).unwrap(), root.join("far"));
        assert_eq!(as_far_as_it_exists(&root.join("link/../new/x")), root.join("far/new/x"));
        assert_eq!(as_far_as_it_exists(&root.join("no/../no2/./x")), root.join("no2/x"));
        assert_eq!(entry_itself(&root.join("link")).unwrap(), root.join("link"));
        assert_eq!(as_far_as_it_exists(&root.join("link")), root.join("far/deep"));
    }

    #[test]
    fn reasons_are_words() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
        let long = "x".repeat(300);
        for (name, expected) in [
            ("none", "not found"),
            ("file", "not a directory"),
            ("file/x", "not a directory"),
            ("loop", "too many levels of symbolic links"),
            (&long, "the name is too long"),
            ("a\0b", "the path has a NUL byte"),
        ] {
            assert_eq!(usable_folder(&dir.path().join(name)).unwrap_err(), expected, "{name}");
        }
    }
}
