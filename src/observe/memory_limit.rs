//! How much memory the process may have: the limit of its control group, as Kubernetes, Docker and systemd set it. Linux
//! only.

use std::fs;
use std::path::{Path, PathBuf};

/// Where control groups are mounted.
const ROOT: &str = "/sys/fs/cgroup";

/// The lowest limit of the process' control group and of those around it; `None` if there is none, or it cannot be read.
pub fn of_process() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    lowest(&groups, |path| fs::read_to_string(path).ok())
}

/// `groups`: lines such as `0::/a/b` (version 2) and `7:memory:/a/b` (version 1). In a container their paths may be the
/// host's, which are not there; the container's own group is then what is mounted as the root.
fn lowest(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut limits = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, file) = if controllers.is_empty() {
            (PathBuf::from(ROOT), "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            (Path::new(ROOT).join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let group = root.join(path.trim_start_matches('/'));
        let around = group.ancestors().take_while(|at| at.starts_with(&root));
        // `max` is no number, and no limit.
        let of_group = |at: &Path| read(&at.join(file))?.trim().parse::<u64>().ok();
        limits.extend(around.filter_map(of_group));
    }
    limits.into_iter().min()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(groups: &str, files: &[(&str, &str)], expected: Option<u64>) {
        let read = |path: &Path| {
            let found = files.iter().find(|(name, _)| Path::new(name) == path);
            found.map(|(_, text)| (*text).to_owned())
        };
        assert_eq!(lowest(groups, read), expected, "{groups}");
    }

    #[test]
    fn the_lowest_limit_of_all_groups_around_the_process_counts() {
        let files = [
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/memory.max", "300\n"),
            ("/sys/fs/cgroup/memory.max", "400\n"),
        ];
        check("0::/a/b\n", &files, Some(300));
        check("0::/\n", &files, Some(400));
        check("0::/a/b\n", &files[..1], None);
        check("", &files, None);
    }

    #[test]
    fn a_container_whose_group_has_the_path_of_the_host_has_the_limit_of_the_root() {
        let old = [("/sys/fs/cgroup/memory/memory.limit_in_bytes", "500\n")];
        let groups = "9:cpu,cpuacct:/docker/1\n7:memory:/docker/1\n0::/docker/1\n";
        check(groups, &old, Some(500));
        check("9:cpu,cpuacct:/docker/1\n", &old, None);
        let new = [("/sys/fs/cgroup/memory.max", "600\n")];
        check("0::/docker/1\n", &new, Some(600));
    }
}
