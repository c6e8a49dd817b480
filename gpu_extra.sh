for n in 1 2; do MGP_TEST_DEVICE=cuda timeout 120 scripts/launch.sh --share-gpu -n $n multi_rank_tests > /tmp/o 2>&1; echo "multi_rank $n rc $?"; grep -E "FAILED|PASSED|error" /tmp/o | head; done
timeout 200 build/bin/unit_tests --gtest_brief=1 2>&1 | grep -E "FAILED|PASSED" 
say extra
