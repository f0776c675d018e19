"""What the process asks of the system before it listens."""

import resource

from router.dataplane.listener import raise_file_limit


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard, 1024) - 1, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
