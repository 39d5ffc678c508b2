"""One rank of a machine of its own: it works in its own folder, with its own flags."""

import json
import os
import sys

import worker

if __name__ == "__main__":
    folder, *flags = json.loads(sys.argv[1])[int(os.environ["RANK"])]
    os.chdir(folder)
    sys.argv[1] = json.dumps([flags])
    worker.main()
