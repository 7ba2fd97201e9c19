//! What git trusts stays as it is, by what a folder holds and not by what it happens to be called.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use std::fs;

use dsh_policy::SandboxMode::WorkspaceWrite;
use dsh_policy::denial::{Operation, Rule};
use dsh_tests::{World, users};

#[test]
fn a_bare_repository_is_protected_and_a_folder_that_is_only_called_like_one_is_not() {
    for user in users() {
        let world = World::new(user);
        let bare = world.workspace().join("bare.git");
        let notes = world.workspace().join("notes.git");
        for folder in [&bare, &notes] {
            fs::create_dir(folder).unwrap();
            user.own(folder);
        }
        for name in ["HEAD", "config"] {
            world.write(&bare.join(name), b"old\n");
        }
        for name in ["refs", "objects", "hooks"] {
            fs::create_dir(bare.join(name)).unwrap();
            user.own(&bare.join(name));
        }
        // Moving one part away must not free the others.
        let command = "echo new > notes.git/config; mkdir notes.git/hooks; echo x > notes.git/hooks/x
            mv bare.git/HEAD kept; echo new >> bare.git/config; echo x > bare.git/hooks/post-receive; mv kept bare.git/HEAD";
        let ran = world.run(WorkspaceWrite, command);
        assert_eq!(fs::read(notes.join("config")).unwrap(), b"new\n");
        assert_eq!(fs::read(bare.join("config")).unwrap(), b"old\n");
        assert!(
            notes.join("hooks/x").exists() && bare.join("HEAD").exists() && !bare.join("hooks/post-receive").exists()
        );
        let facts = ran.facts();
        let told: Vec<_> = facts
            .iter()
            .map(|fact| (fact.operation, fact.rule, fact.path.as_ref().unwrap().to_path_buf()))
            .collect();
        let expected = [
            (Operation::WriteFile, Rule::ProtectedPath, bare.join("config")),
            (
                Operation::CreateFile,
                Rule::ProtectedPath,
                bare.join("hooks/post-receive"),
            ),
        ];
        assert_eq!(told, expected, "{user:?}");
    }
}
